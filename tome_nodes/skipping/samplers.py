"""The samplers under which forecasts change the picture less than fewer steps do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import reasons
from .steps import FASTER, LONG, SHORTEST, are_apart


@dataclass(frozen=True)
class Sampler:
    """What is known of a sampler.

    Attributes:
        least: the fewest steps of a run that has forecasts. Samplers that add noise or look back
            need more.
        corrects: whether the answer after a forecast is to make up for its error. The correction is
            Euler's; some samplers make more of an answer, and are worse off with it.
        apart: in runs of fewer steps than this, no two noise levels may be so close that they
            count as one.
        faster: see :func:`tome_nodes.skipping.steps.is_even`.
    """

    least: int
    corrects: bool = True
    apart: int = LONG
    faster: float = FASTER

    def obstacle(self, levels: Sequence[float]) -> reasons.Reason | None:
        """Why nothing can be forecast in a run, as far as its noise levels show.

        ``levels`` is the logarithm of signal to noise of every step.
        """
        count = len(levels)
        if count < self.least:
            return reasons.too_short(count, self.least)
        if count < self.apart and not are_apart(levels):
            return reasons.UNEVEN
        return None


UNKNOWN = Sampler(SHORTEST, corrects=False)
"""A sampler of which nothing is known."""

_LOOKS_BACK = Sampler(8, faster=1.45)

SAMPLERS: Mapping[str, Sampler] = {
    "euler": Sampler(SHORTEST, apart=0),
    "euler_ancestral": Sampler(10),
    "ddpm": Sampler(8),
    "er_sde": Sampler(8),
    "dpmpp_2m": _LOOKS_BACK,
    "res_multistep": _LOOKS_BACK,
    "sa_solver": Sampler(8, corrects=False),
}
"""The samplers under which forecasts hold (benchmarks/FIDELITY.md), by the names of ComfyUI's
functions without ``sample_``. They evaluate a step once. Under the others, forecasts change the
picture more than fewer steps do, mostly because these samplers add noise or look back far."""
