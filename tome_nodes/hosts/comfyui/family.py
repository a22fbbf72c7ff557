"""What all families of ComfyUI's models share: how their attention is reached."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ...core.site import BlockSite, Family
from .attention import REPLACED, merge_attention, weigh_attention


class ComfyBlock(BlockSite):
    """A transformer block, which is called with the host's transformer options."""

    tokens_changed = "another node changes the tokens of the transformer blocks"
    attention_masked = "another node masks the attention or changes its tokens"
    attention_replaced = "other nodes replace the attention of the transformer blocks"

    def is_masked(self, kwargs: Mapping[str, Any]) -> bool:
        return kwargs.get("mask") is not None

    def weigh_keys(self, kwargs: dict[str, Any], log_sizes: Tensor) -> dict[str, Any]:
        self.note_unweighted(REPLACED)
        options = kwargs.get("transformer_options") or {}
        weighed = weigh_attention(options, log_sizes, self.ops, self.note_unweighted)
        return kwargs | {"transformer_options": weighed}

    def merge_at_call(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = kwargs.get("transformer_options") or {}
        return kwargs | {"transformer_options": merge_attention(options, self)}


class ComfyFamily(Family):
    """A class of ComfyUI's diffusion models, and how its blocks are found and called."""

    model_class: ClassVar[str]
    """Its full name; it is not imported, as an older host may lack it."""

    def matches(self, model: nn.Module) -> bool:
        """Whether a model is of this class, or of one made from it."""
        names = (f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__)
        return self.model_class in names
