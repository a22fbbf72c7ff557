"""What has to be known of the UNets of a library that calls them as modules."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ..merging.deep_blocks import DeepBlocks
from ..merging.unet import UNetFamily
from ..reasons import Reason
from ..settings.config import ToMeConfig
from .arguments import total, traits

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""The arguments of a call, by position and by name."""


class UNets:
    """The UNets of a library.

    Attributes:
        family: how they are built.
    """

    family: UNetFamily

    def obstacle(self, unet: Any, config: ToMeConfig) -> Reason | None:
        """Why a UNet cannot merge tokens in its current state, None if it can."""
        raise NotImplementedError

    def deep_blocks(self, unet: Any) -> DeepBlocks | None:
        """All blocks of a UNet but the outermost ones; None if they are not as known."""
        raise NotImplementedError

    def whole_only(self, unet: Any) -> Reason | None:
        """Why all blocks of a UNet have to run in its current state, None if they do not."""
        return None

    def conditions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """What decides the answer of a call besides the latent and the timestep.

        ``args`` are those behind the two.
        """
        return traits({**dict(enumerate(args)), **kwargs}, lambda _: total)

    def strengths(self, unet: Any) -> Callable[[], Hashable]:
        """What reads how strongly each adapter of a UNet acts, which may change within a run."""
        return lambda: None

    def shallow_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
        """The same arguments in a shallow call; None if the call has to be whole."""
        return args, kwargs
