"""The steps of a sampling run at which settings are tried."""

from ..patching.detail_cache import is_full
from ..settings.config import ToMeConfig

_MOST = 3


def full_steps(config: ToMeConfig, steps: int, from_noise: bool) -> list[int]:
    """The steps of a run that run on all tokens.

    Args:
        config: the settings.
        steps: those of the run, at least 1.
        from_noise: whether it begins with noise alone.
    """
    if config.scope != "stack":
        return []
    return [step for step in range(steps) if is_full(config, step, steps - 1 - step, from_noise)]


def trial_steps(config: ToMeConfig, steps: int, from_noise: bool) -> list[int]:
    """Up to three steps, spread over a run, at which to try settings like ``config``.

    Where steps run on all tokens, these are the steps right after them: there, merged tokens keep
    detail as they do in a run.
    """
    full = full_steps(config, steps, from_noise)
    found = [step + 1 for step in full if step + 1 < steps and step + 1 not in full]
    if len(found) < _MOST and 0 not in full:
        found.insert(0, 0)
    if len(found) > _MOST:
        return [found[0], found[len(found) // 2], found[-1]]
    return found or [0]
