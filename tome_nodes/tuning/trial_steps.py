"""Where on the way of a sampling run settings are tried."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..patching.detail_cache import is_full
from ..patching.schedule import Moment
from ..settings.config import ToMeConfig

_MOST = 3


@dataclass(frozen=True)
class Place:
    """A step at which settings are tried.

    Attributes:
        step: from 0.
        before: the step before, if settings with steps on all tokens run on all tokens there.
    """

    step: int
    before: int | None = None


def full_steps(config: ToMeConfig, steps: int, from_noise: bool) -> list[int]:
    """The steps of a run that settings run on all tokens."""
    return [
        step
        for step in range(steps)
        if config.scope == "stack"
        and is_full(
            config,
            Moment(
                step=step,
                progress=0.0,
                picks=0,
                part=None,
                is_active=True,
                steps_left=steps - 1 - step,
                from_noise=from_noise,
            ),
        )
    ]


def places(config: ToMeConfig, steps: int, from_noise: bool) -> list[Place]:
    """Up to three places over a run, from its first steps to its last.

    They are right after steps on all tokens as far as there are such steps, so that settings keep
    their detail there as they do in a run.

    Args:
        config: settings with steps on all tokens.
        steps: those of the run, at least 1.
        from_noise: whether it begins with noise alone.
    """
    full = full_steps(config, steps, from_noise)
    after = [step + 1 for step in full if step + 1 < steps]
    found = [Place(step, step - 1) for step in after if step not in full]
    if len(found) < _MOST and 0 not in full:
        found.insert(0, Place(0))
    return _spread(found) or [Place(0)]


def _spread(found: Sequence[Place]) -> list[Place]:
    """The first, the middle and the last."""
    if len(found) <= _MOST:
        return list(found)
    return [found[0], found[len(found) // 2], found[-1]]
