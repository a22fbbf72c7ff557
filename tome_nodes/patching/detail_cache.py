"""Steps on all tokens, and the detail that merged tokens keep from the last of them.

A stack on merged tokens changes all tokens of a slot alike. How they differed when the stack last
ran on all tokens changes little from step to step, so it is added until the next such step. On all
tokens, attention may still merge keys and values, which hardly changes pictures.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..merging.plan import Plan
from ..settings.config import ToMeConfig
from .schedule import Moment

# How many parts of a step keep anything, and how many the changes of their stacks: those of a tiled
# picture are as large as all its tiles.
_PARTS_KEPT = 64
_PARTS_WITH_CHANGES = 16

FADING = 0.8
"""The share of a stack's detail that is still right one step later (benchmarks/FIDELITY.md)."""


def is_full(config: ToMeConfig, step: int, steps_left: int | None, from_noise: bool) -> bool:
    """Whether a step runs on all tokens: every ``refresh_steps``-th does.

    If the number of steps is known, they are counted back from the second to last. So the last
    step has fresh detail, and is not one of them: nothing would use the detail that it gives. The
    first step is one only if the run begins with a picture: noise has no detail to keep, and that
    of a picture must not get lost.

    Args:
        config: the settings.
        step: the number of the step, from 0.
        steps_left: how many steps come after it, None if that is not known.
        from_noise: whether the run begins with noise alone.
    """
    every = config.refresh_steps
    if every == 0:
        return False
    if step == 0:
        return not from_noise
    place = step if steps_left is None else steps_left - 1
    return place % every == 0


_MOST_APART = 0.4
"""How far apart the means of two answers for one place are at most, as a share of the sum of their
variances. Those of two places are 1 apart on average (benchmarks/FIDELITY.md)."""

_ALIKE = 0.01
"""A squared difference that is never too large; latents have a variance of about 1."""

_NEIGHBOURHOOD = 4
"""The side of the squares of a latent whose means are compared."""

MOVES = "as other places of the picture are evaluated from step to step"
"""The reason to report if kept detail is of another place."""

GRADIENTS = "as gradients are computed"
"""The reason to report while nothing is kept, since it would be of another training sample."""


@dataclass(eq=False)
class Detail:
    """What one part of a step keeps for later steps.

    Attributes:
        is_full: whether it runs on all tokens now.
        keeps_changes: whether there is room for what stacks change.
        changes: what each stack changed when it last did, ``[batch, tokens, channels]``, by name.
        share: the share of the detail of these changes that is still right, a scalar.
        means: those of the neighbourhoods of the denoised latent when the model last ran on all
            tokens, see :func:`means_of`.
    """

    is_full: bool = False
    keeps_changes: bool = True
    changes: dict[str, Tensor] = field(default_factory=dict)
    share: Tensor | None = None
    means: Tensor | None = None

    def add_change(
        self, stack: str, plan: Plan, x: Tensor, before: Tensor, after: Tensor
    ) -> Tensor:
        """As :meth:`tome_nodes.merging.plan.Plan.add_change`, with the detail of the change.

        Without any that fits, the same as that.
        """
        kept = _fitting(self.changes.get(stack), x)
        if self.share is None or kept is None or kept.dtype != x.dtype:
            return plan.add_change(x, before, after)
        x = torch.addcmul(x, kept, self.share)
        before = torch.addcmul(before, plan.merge(kept), self.share)
        return plan.add_change(x, before, after)

    def is_of(self, denoised: Tensor) -> bool:
        """Whether the changes that were kept belong to the place of a model's answer, if any are.

        A step on all tokens keeps the means of its answer, to compare later answers with.

        Args:
            denoised: ``[batch, channels, height, width]``.
        """
        if not self.changes:
            return True
        means = means_of(denoised)
        if self.is_full:
            self.means = means
        kept = _fitting(self.means, means)
        return kept is None or belongs(kept, means)


def means_of(denoised: Tensor) -> Tensor:
    """The means of a latent's neighbourhoods, ``[batch, means, channels]``.

    Args:
        denoised: ``[batch, channels, height, width]``, with frames before the height if it is a
            video.
    """
    height, width = denoised.shape[-2:]
    size = min(height, _NEIGHBOURHOOD), min(width, _NEIGHBOURHOOD)
    still = denoised.float().flatten(1, -3)
    pooled = F.avg_pool2d(still, size).unflatten(1, denoised.shape[1:-2])
    return pooled.flatten(2).transpose(1, 2)


def belongs(kept: Tensor, new: Tensor) -> bool:
    """Whether what was kept is of the place that is evaluated now, in each sample.

    Nodes that tile may evaluate other places from step to step, and only the answer tells them
    apart: the means of its neighbourhoods change little over the steps, and much between places.

    Args:
        kept: means of the answer that was kept, ``[batch, means, channels]``.
        new: the same of the new answer.
    """
    kept, new = (each.float() - each.float().mean(1, keepdim=True) for each in (kept, new))
    apart, spread = (new - kept).square().mean((1, 2)), (new.square() + kept.square()).mean((1, 2))
    return bool((apart <= _MOST_APART * spread + _ALIKE).all())


def _fitting(kept: Tensor | None, like: Tensor) -> Tensor | None:
    """What was kept, None if it is not of the shape and device of ``like``."""
    fits = kept is not None and kept.shape == like.shape and kept.device == like.device
    return kept if fits else None


class Details:
    """The :class:`Detail` of each part of a step, from step to step."""

    def __init__(self, config: ToMeConfig):
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Drop all: another run begins."""
        self._kept: dict[Hashable, Detail] = {}
        self._used: set[Hashable] = set()
        self._step = -1
        self._steps = 0
        self._steps_when_full = 0

    def at(self, moment: Moment, device: torch.device) -> Detail:
        """The detail of the part that is evaluated."""
        if moment.step != self._step:
            # Windows that move are other parts in each step.
            self._kept = {part: kept for part, kept in self._kept.items() if part in self._used}
            self._used.clear()
            self._step = moment.step
            # The numbers of steps fall where a picture is turned into noise.
            self._steps += 1
        self._used.add(moment.part)
        detail = self._kept.get(moment.part)
        if detail is None:
            detail = Detail(keeps_changes=len(self._kept) < _PARTS_WITH_CHANGES)
            if len(self._kept) < _PARTS_KEPT:
                self._kept[moment.part] = detail
        detail.is_full = is_full(self._config, moment.step, moment.steps_left, moment.from_noise)
        if detail.is_full:
            detail.changes.clear()
            self._steps_when_full = self._steps
        elif detail.changes:
            share = FADING ** (self._steps - self._steps_when_full)
            detail.share = torch.full((), share, device=device)
        return detail
