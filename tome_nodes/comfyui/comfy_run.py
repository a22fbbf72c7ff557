"""What the parts of a sampling run in ComfyUI share."""

from dataclasses import dataclass
from typing import Any

from ..run.sampling_run import SamplingRun
from .guided_answers import Latents
from .step_count import StepCount


@dataclass(frozen=True, eq=False)
class ComfyRun:
    """A sampling run in ComfyUI.

    Attributes:
        run: the run, as in any host.
        guider: ComfyUI's guider. Its model options are of this run alone.
        sampler: the name of the sampler, see :func:`function_of`.
        is_flow: whether latents go straight from noise to a picture.
        steps: counts its steps.
        latents: follows its latents.
    """

    run: SamplingRun
    guider: Any
    sampler: str
    is_flow: bool
    steps: StepCount
    latents: Latents

    @property
    def name(self) -> str:
        """The host's name for the kind of model."""
        return type(self.guider.model_patcher.model.model_config).__name__


def function_of(sampler: Any) -> str:
    """The name of a sampler, or of the sampler that it wraps, without ``sample_``."""
    options = getattr(sampler, "extra_options", {})
    for inner in options.values():
        if hasattr(inner, "sampler_function"):
            return function_of(inner)
    function = getattr(sampler, "sampler_function", None)
    name = str(getattr(function, "__name__", type(sampler).__name__)).removeprefix("sample_")
    name = _NAMES.get(name, name)
    return f"{name} with s_churn" if options.get("s_churn") else name


_NAMES = {"unipc": "uni_pc", "unipc_bh2": "uni_pc_bh2"}
"""The names of samplers whose functions have another."""
