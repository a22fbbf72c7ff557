"""UNets of libraries that call them as modules."""

from typing import NamedTuple

from torch import nn

from ..settings.config import ToMeConfig
from .arguments import TIMESTEPS
from .merging_calls import MergingCalls
from .patched_calls import PatchedCalls
from .patched_model import Host, NetworkPatch
from .scheduling import Scheduling
from .unets import UNets


class UNetContext(NamedTuple):
    """What has to be known of a UNet besides itself.

    Attributes:
        scheduling: knows the scheduler of its pipeline, if it has one.
        levels: the number of noise levels that it was trained on.
    """

    scheduling: Scheduling
    levels: int = TIMESTEPS


class UNetHost(UNets, Host):
    """A library whose UNets are called as modules. Their context is a :class:`UNetContext`."""

    def check(self, model: nn.Module, config: ToMeConfig, context: UNetContext) -> None:
        if not any(stack.blocks for stack in self.family.stacks(model)):
            raise TypeError(
                "token merging needs a model with transformer blocks, and this "
                f"{type(model).__name__} has none"
            )

    def calls(self, patch: NetworkPatch, model: nn.Module) -> PatchedCalls:
        scheduling, levels = patch.context
        return MergingCalls(
            *(patch.config, self, model, patch.make_strategy, levels, scheduling, patch.once)
        )
