"""The samplers under which forecasts change the picture less than fewer steps do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .. import reasons
from .steps import (
    FASTER,
    LONG,
    LONG_ON_UNET,
    SHORTEST,
    are_apart,
    are_geometric,
    begins_fast,
    begins_slowly,
)


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
        faster: see :func:`tome_nodes.forecasting.steps.is_even`.
        needs_fast_start: whether noise must fall faster in the first step than in the second.
        on_unets, on_transformers: whether forecasts hold there.
    """

    least: int
    corrects: bool = True
    apart: int = LONG
    faster: float = FASTER
    needs_fast_start: bool = False
    on_unets: bool = True
    on_transformers: bool = True

    def holds(self, is_unet: bool) -> bool:
        """Whether forecasts hold on UNets, or else on transformers."""
        return self.on_unets if is_unet else self.on_transformers

    @property
    def looks_back(self) -> bool:
        """Whether it puts a line through the answers of several steps."""
        return self.faster != FASTER

    def obstacle(self, levels: Sequence[float], is_unet: bool) -> str | None:
        """Why nothing can be forecast in a run, as far as its noise levels show.

        Args:
            levels: the logarithm of signal to noise of every step.
            is_unet: whether the model is a UNet.
        """
        count = len(levels)
        if count < self.least:
            return reasons.too_short(count, self.least)
        if count < self.apart and not are_apart(levels):
            return reasons.UNEVEN
        if self.needs_fast_start and not begins_fast(levels):
            return reasons.UNEVEN
        if is_unet and (begins_slowly(levels) or (self.looks_back and are_geometric(levels))):
            return reasons.UNEVEN
        return None


_LOOKS_BACK = Sampler(8, faster=1.45)
_ON_LONG_UNETS = Sampler(LONG_ON_UNET, corrects=False, faster=1.45, on_transformers=False)
_UNI_PC = replace(_ON_LONG_UNETS, needs_fast_start=True)

SAMPLERS: Mapping[str, Sampler] = {
    "euler": Sampler(SHORTEST, apart=0),
    "euler_ancestral": Sampler(10),
    "ddpm": Sampler(8),
    "er_sde": Sampler(8, on_unets=False),
    "dpmpp_2m": _LOOKS_BACK,
    "res_multistep": _LOOKS_BACK,
    "sa_solver": Sampler(8, corrects=False, on_unets=False),
    "uni_pc": _UNI_PC,
    "lcm": _ON_LONG_UNETS,
}
"""The samplers under which forecasts hold (benchmarks/FIDELITY.md), by the names of ComfyUI's
functions without ``sample_``. They evaluate a step once. Under the others, forecasts change the
picture more than fewer steps do, mostly because these samplers add noise or look back far."""
