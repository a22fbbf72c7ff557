"""The transformers of the diffusers library, whose answers are forecast in some steps.

It has to be known how a transformer predicts a flow (:mod:`tome_nodes.python.flow_call`) and where
a call is in the run of its pipeline (:mod:`tome_nodes.python.pipeline_runs`).
"""

from collections.abc import Mapping, Sequence

from torch import nn

from ..merging.model import unwrapped
from ..settings.config import ToMeConfig
from .forecast_calls import ForecastCalls
from .patched_calls import PatchedCalls
from .patched_model import Host, NetworkPatch
from .pipeline_runs import PipelineRuns
from .scheduling import Scheduling


class DiffusersTransformers(Host):
    """Transformers of pictures and videos.

    The context of a transformer is the runs of its pipeline, None without a pipeline.
    """

    forecasts = True

    def find(self, model: object) -> Sequence[tuple[nn.Module, PipelineRuns | None]]:
        """The transformers of a pipeline, or the model itself if it is one."""
        components = getattr(model, "components", None)
        if not isinstance(components, Mapping):
            own = unwrapped(model)
            kinds = type(own).__mro__ if isinstance(own, nn.Module) else ()
            is_one = any(
                kind.__module__.startswith("diffusers.models.transformers.") for kind in kinds
            )
            return [(own, None)] if is_one else []
        named = ((name, unwrapped(component)) for name, component in components.items())
        runs = PipelineRuns(Scheduling(model))
        return [
            (component, runs)
            for name, component in named
            if name.startswith("transformer") and isinstance(component, nn.Module)
        ]

    def check(self, model: nn.Module, config: ToMeConfig, context: PipelineRuns | None) -> None:
        if not config.forecast:
            raise ValueError(
                "forecast=False is not allowed for a transformer of diffusers: no tokens merge in "
                "it, but its steps can be forecast; pass preset='balanced', or forecast=True"
            )
        if context is None:
            raise ValueError(
                f"a {type(model).__name__} alone does not know its steps, whose answers are to be "
                "forecast; pass its pipeline"
            )

    def calls(self, patch: NetworkPatch, model: nn.Module) -> PatchedCalls:
        return ForecastCalls(patch.config, model, patch.context)
