"""Steps on all tokens, and the detail that merged tokens keep from the last of them.

A stack on merged tokens changes all tokens of a slot alike. How they differed when the stack last
ran on all tokens changes little from step to step, so it is added until the next such step.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import ToMeConfig
from .plan import Plan
from .schedule import Moment

# How many parts of a step keep their detail; that of a tiled picture is as large as all its tiles.
_PARTS_KEPT = 16

FADING = 0.8
"""The share of a stack's detail that is still right one step later (benchmarks/FIDELITY.md)."""


def is_full(config: ToMeConfig, moment: Moment) -> bool:
    """Whether a step runs on all tokens: one in ``refresh_steps``.

    They are counted back from the last step but one, if the last is known: that gives the last one
    fresh detail, and costs no step that nothing comes after. The first step is one only if the run
    begins with a picture: noise has no detail to keep, and that of a picture must not get lost.
    """
    every = config.refresh_steps
    if every == 0 or config.scope != "stack":
        return False
    if moment.step == 0:
        return not moment.from_noise
    place = moment.step if moment.steps_left is None else moment.steps_left - 1
    return place % every == 0


@dataclass(eq=False)
class Detail:
    """What one part of a step keeps for later steps.

    Attributes:
        is_full: whether it runs on all tokens now.
        changes: what each stack changed when it last did, ``[batch, tokens, channels]``, by name.
        share: the share of the detail of these changes that is still right, a scalar.
        denoised: the denoised latent when the model last ran on all tokens.
        latest: the denoised latent of the last step.
    """

    is_full: bool = False
    changes: dict[str, Tensor] = field(default_factory=dict)
    share: Tensor | None = None
    denoised: Tensor | None = None
    latest: Tensor | None = None

    def add_change(
        self, stack: str, plan: Plan, x: Tensor, before: Tensor, after: Tensor
    ) -> Tensor:
        """As :meth:`tome_nodes.core.plan.Plan.add_change`, with the detail of the stack's change.

        Without any that fits, the same as that.
        """
        kept = self.changes.get(stack)
        if self.share is None or kept is None or kept.shape != x.shape or kept.dtype != x.dtype:
            return plan.add_change(x, before, after)
        x = torch.addcmul(x, kept, self.share)
        before = torch.addcmul(before, plan.merge(kept), self.share)
        return plan.add_change(x, before, after)


class Details:
    """The :class:`Detail` of each part of a step, from step to step."""

    def __init__(self, config: ToMeConfig):
        self._config = config
        self._kept: dict[Hashable, Detail] = {}
        self._used: set[Hashable] = set()
        self._step = 0
        self._full_step = 0

    def clear(self) -> None:
        """Drop all: another run begins."""
        self._kept.clear()

    def at(self, moment: Moment, device: torch.device) -> Detail | None:
        """The detail of the part that is evaluated, None if no stack runs as one."""
        if self._config.scope != "stack":
            return None
        if moment.step != self._step:
            # Windows that move are other parts in each step.
            self._kept = {part: kept for part, kept in self._kept.items() if part in self._used}
            self._used.clear()
            self._step = moment.step
        self._used.add(moment.part)
        detail = self._kept.get(moment.part)
        if detail is None:
            detail = Detail()
            if len(self._kept) < _PARTS_KEPT:
                self._kept[moment.part] = detail
        detail.is_full = is_full(self._config, moment)
        if detail.is_full:
            detail.changes.clear()
            self._full_step = moment.step
        elif detail.changes:
            share = FADING ** (moment.step - self._full_step)
            detail.share = torch.full((), share, device=device)
        return detail
