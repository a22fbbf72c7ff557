"""What is known about the UNets of a host."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .attention_trial import Attention
from .block import Block
from .evaluation import ModelState
from .stack import Stack
from .unet_block import UNetBlock, UNetCalls
from .work import Layer, Work, block_work, has_projections


@dataclass(frozen=True, kw_only=True)
class UNetFamily(UNetCalls):
    """What is known about the UNets of a host: how they are built, and how blocks are called.

    Attributes:
        layers: the modules of a model, in running order.
        is_stack: whether a module is a stack, which holds its blocks as ``transformer_blocks``.
        attentions: see :meth:`tome_nodes.merging.model.ModelFamily.attentions`.
    """

    layers: Callable[[Any], Iterable[Layer]]
    is_stack: Callable[[nn.Module], bool]
    attentions: Callable[[], Iterable[Attention]] = tuple

    def stacks(self, model: Any) -> Iterator[Stack]:
        for name, module, level in self.layers(model):
            if self.is_stack(module):
                blocks: Any = module.transformer_blocks
                yield Stack(name, module, tuple(blocks), level)

    def block(self, model: ModelState, stack: Stack, index: int) -> UNetBlock:
        return UNetBlock(model, stack, index, self)

    def work(self, model: Any, blocks: Sequence[Block]) -> Work | None:
        # Another library may have changed attention.
        if not all(has_projections(block.module) for block in blocks):
            return None
        works = (
            block_work(
                block.module,
                block.stack.level,
                block.merges_only_keys,
                not self.attends_to_text(block.module),
            )
            for block in blocks
        )
        return Work(self.layers(model), tuple(works))


def layers_by_level(model: nn.Module) -> Iterator[Layer]:
    """The modules of a UNet whose code descends from latent-diffusion's.

    Its modules are in the order they run, and the classes of layers between its levels are
    named ``Downsample`` and ``Upsample``.
    """
    level = 1
    for name, module in model.named_modules():
        kind = type(module).__name__
        # A residual block resizes its skip connection, too; this counts only once.
        if kind == "Downsample" and not name.endswith(".x_upd"):
            level *= 2
        elif kind == "Upsample" and not name.endswith(".x_upd"):
            level //= 2
        yield name, module, level
