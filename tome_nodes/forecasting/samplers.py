"""The samplers under which forecasts change the picture less than fewer steps do."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from .steps import LONG, SHORTEST


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
    """

    least: int
    corrects: bool
    apart: int


SAMPLERS: Mapping[str, Sampler] = {
    "euler": Sampler(SHORTEST, True, 0),
    "euler_ancestral": Sampler(10, True, LONG),
    **dict.fromkeys(("ddpm", "dpmpp_2m", "er_sde", "res_multistep"), Sampler(8, True, LONG)),
    "sa_solver": Sampler(8, False, LONG),
    **dict.fromkeys(("unipc", "unipc_bh2"), Sampler(8, False, sys.maxsize)),
}
"""The samplers under which forecasts hold (benchmarks/FIDELITY.md), by the names of ComfyUI's
functions without ``sample_``. They evaluate a step once. Under the others, forecasts change the
picture more than fewer steps do, mostly because these samplers add noise or look back far."""
