"""A record for transformers that have none of their own."""

from dataclasses import dataclass, replace

from torch import nn

from ...patching.blocks import lists_of
from .transformers import Transformer, one_picture


@dataclass(frozen=True)
class UnknownTransformer(Transformer):
    """A transformer of any class, whose pictures are found by :mod:`tome_nodes.comfyui.asking`."""

    remarks = ("unknown model, picture found by asking",)

    def obstacle(self, model: nn.Module) -> str | None:
        return None

    def changed_part(self, model: nn.Module) -> str | None:
        return None

    def answered(self, stacks: tuple[str, ...], passes_options: bool) -> "UnknownTransformer":
        """This record with what an answer says.

        Args:
            stacks: the names of the lists whose blocks attend to a picture. If there are none, all
                lists are kept.
            passes_options: see :class:`tome_nodes.patching.merge_attention.TransformerRecord`.
        """
        return replace(self, blocks=stacks or self.blocks, passes_options=passes_options)


def unknown_transformer(model: nn.Module) -> UnknownTransformer:
    """The record of a transformer that has no other."""
    return UnknownTransformer((), one_picture(1), blocks=tuple(lists_of(model)))
