"""UNets of libraries that call them as modules."""

from typing import Any, ClassVar, NamedTuple

from torch import nn

from ..patching.unet import UNetRecord
from ..settings.config import ToMeConfig
from .forecast_calls import ForecastCalls
from .merging_calls import MergingCalls
from .model_call import TIMESTEPS
from .noise_call import noise_call
from .patched_calls import PatchedCalls
from .patched_model import Host, NetworkPatch
from .pipeline_runs import PipelineRuns


class UNetContext(NamedTuple):
    """What has to be known of a UNet besides itself.

    Attributes:
        levels: the number of noise levels that it was trained on.
        runs: the runs of its pipeline; None if it has none, and nothing is forecast.
    """

    levels: int = TIMESTEPS
    runs: PipelineRuns | None = None


class UNetHost(Host):
    """A library whose UNets are called as modules. Their context is a :class:`UNetContext`."""

    record: ClassVar[UNetRecord]
    """How its UNets are built."""

    def check(self, model: nn.Module, config: ToMeConfig, context: UNetContext) -> None:
        if not any(stack.blocks for stack in self.record.stacks(model)):
            raise TypeError(
                "token merging needs a model with transformer blocks, and this "
                f"{type(model).__name__} has none"
            )

    def calls(self, patch: NetworkPatch, model: nn.Module) -> PatchedCalls:
        config, context = patch.config, patch.context
        forecasting = None
        if context.runs is not None and config.forecast and config.ratio > 0:
            forecasting = ForecastCalls(config, model, context.runs, noise_call)
        merging = MergingCalls(
            *(config, self.record, model, patch.make_strategy, context.levels),
            *(self.obstacle, patch.once),
        )
        return PatchedCalls(model, forecasting, merging)

    def obstacle(self, model: Any, config: ToMeConfig) -> str | None:
        """Why a UNet cannot merge tokens in its current state, None if it can."""
        raise NotImplementedError
