"""Full steps, which run on all tokens, and the detail that later steps reuse from them.

A stack that runs on merged tokens changes all tokens of a slot alike. In a full step it changes
them differently, and these differences change little from step to step. So they are added to the
results of merged steps until the next full step. In full steps attention may still merge keys and
values, which hardly changes pictures.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..merging.plan import Plan
from ..settings.config import ToMeConfig
from .schedule import Moment

# At most this many parts of a step keep anything. Fewer keep the changes of stacks, which for a
# tiled picture are as large as all of its tiles.
_PARTS_KEPT = 64
_PARTS_WITH_CHANGES = 16

FADING = 0.8
"""The share of a stack's detail that is still right one step later (benchmarks/FIDELITY.md)."""


def _is_full(every: int, moment: Moment) -> bool:
    """Whether a step is a full step; one in ``every`` steps is.

    If the number of steps is known, full steps are counted back from the second to last, so that
    the last step has fresh detail. The last step itself is not a full step, since no step would use
    its detail. The first step is a full step only if the run begins with a picture, whose detail
    must not get lost; noise has no detail to keep.
    """
    if moment.step == 0:
        return not moment.from_noise
    place = moment.step if moment.steps_left is None else moment.steps_left - 1
    return place % every == 0


_MOST_APART = 0.4
"""The largest squared difference between the means of two answers for the same place, as a share of
the sum of their variances. For independent answers it is 1 on average."""

_ALIKE = 0.01
"""A squared difference that is never too large; latents have a variance of about 1."""

_NEIGHBOURHOOD = 4
"""The side of the squares of a latent whose means are compared."""


@dataclass(eq=False)
class Detail:
    """What is kept of one part of a step for later steps.

    Attributes:
        is_full: whether the current step is a full step.
        keeps_changes: whether there is room for the changes of stacks.
        changes: by the name of a stack, its change in the last full step,
            ``[batch, tokens, channels]``.
        share: the share of this detail that is still right, a scalar; None before it is used.
        means: :func:`means_of` the denoised latent of the last full step.
    """

    is_full: bool = False
    keeps_changes: bool = True
    changes: dict[str, Tensor] = field(default_factory=dict)
    share: Tensor | None = None
    means: Tensor | None = None

    def add_change(
        self, stack: str, plan: Plan, x: Tensor, before: Tensor, after: Tensor
    ) -> Tensor:
        """:meth:`tome_nodes.merging.plan.Plan.add_change`, plus the kept detail if it fits."""
        kept = _fitting(self.changes.get(stack), x)
        if self.share is None or kept is None or kept.dtype != x.dtype:
            return plan.add_change(x, before, after)
        x = torch.addcmul(x, kept, self.share)
        before = torch.addcmul(before, plan.merge(kept), self.share)
        return plan.add_change(x, before, after)

    def is_of(self, denoised: Tensor) -> bool:
        """Whether the kept changes, if any, belong to the place that the model answered for.

        A full step keeps the means of its answer, and later answers are compared with them.

        Args:
            denoised: the answer, ``[batch, channels, height, width]``.
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
    """Whether two answers are for the same place of the picture, in every sample.

    Nodes that tile may evaluate different places from step to step, and only the answers tell them
    apart: the means of neighbourhoods change little over the steps, and much between places.

    Args:
        kept: the means of the kept answer, ``[batch, means, channels]``.
        new: the means of the new answer, of the same shape.
    """
    kept, new = (means.float() - means.float().mean(1, keepdim=True) for means in (kept, new))
    apart, spread = (new - kept).square().mean((1, 2)), (new.square() + kept.square()).mean((1, 2))
    return bool((apart <= _MOST_APART * spread + _ALIKE).all())


def _fitting(kept: Tensor | None, like: Tensor) -> Tensor | None:
    """``kept`` if it has the shape and device of ``like``, else None."""
    fits = kept is not None and kept.shape == like.shape and kept.device == like.device
    return kept if fits else None


class Details:
    """The :class:`Detail` of every part of a step, from step to step."""

    def __init__(self, config: ToMeConfig):
        self._refresh_steps = config.refresh_steps
        self.clear()

    def clear(self) -> None:
        """Drop everything: another run begins."""
        self._kept: dict[Hashable, Detail] = {}
        self._used: set[Hashable] = set()
        self._step = -1
        self._steps = 0
        self._steps_when_full = 0

    def at(self, moment: Moment, device: torch.device) -> Detail:
        """The detail of the part of a step that is evaluated."""
        if moment.step != self._step:
            # Parts that the last step did not evaluate, such as moving windows, do not return.
            self._kept = {part: kept for part, kept in self._kept.items() if part in self._used}
            self._used.clear()
            self._step = moment.step
            # Not the step's number, which falls where a picture is turned into noise.
            self._steps += 1
        self._used.add(moment.part)
        detail = self._kept.get(moment.part)
        if detail is None:
            detail = Detail(keeps_changes=len(self._kept) < _PARTS_WITH_CHANGES)
            if len(self._kept) < _PARTS_KEPT:
                self._kept[moment.part] = detail
        detail.is_full = _is_full(self._refresh_steps, moment)
        if detail.is_full:
            detail.changes.clear()
            self._steps_when_full = self._steps
        elif detail.changes:
            share = FADING ** (self._steps - self._steps_when_full)
            detail.share = torch.full((), share, device=device)
        return detail
