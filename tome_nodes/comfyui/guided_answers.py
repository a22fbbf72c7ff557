"""What the parts of a run that follow its guided answers share: forecasts, and shallow steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from comfy.patcher_extension import WrappersMP

from .. import reasons
from ..patching.schedule import is_active, progress_at
from ..settings.config import ToMeConfig
from .neighbours import KEY


@contextmanager
def wrapped(guider: Any, predict_noise: Callable[..., Any]) -> Iterator[None]:
    """Wrap the guided answers of a run of ComfyUI's ``guider``, inside of all other wrappers."""
    options = guider.model_options["transformer_options"]
    wrappers = options.setdefault("wrappers", {}).setdefault(WrappersMP.PREDICT_NOISE, {})
    wrappers.pop(KEY, None)
    wrappers[KEY] = [predict_noise]
    try:
        yield
    finally:
        del wrappers[KEY]


def options_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model options among the arguments of ``CFGGuider.predict_noise``."""
    options: Mapping[str, Any] = args[2] if len(args) > 2 else kwargs.get("model_options", {})
    return options


def none_is_active(
    config: ToMeConfig, schedule: Sequence[float], percent_to_sigma: Callable[[float], float]
) -> str | None:
    """Why the percents of the settings leave out all steps of a run; None if they do not."""
    if any(is_active(config, noise, percent_to_sigma) for noise in schedule[:-1]):
        return None
    begins = progress_at(schedule[0], percent_to_sigma)
    return reasons.percents(config.start_percent, config.end_percent, begins)


def is_cached(model_options: Mapping[str, Any]) -> bool:
    """Whether EasyCache or LazyCache skips steps of a run."""
    return "easycache" in model_options["transformer_options"]


def has_moving_windows(model_options: Mapping[str, Any]) -> bool:
    """Whether a run has context windows that move from step to step."""
    windows = getattr(model_options.get("context_handler"), "context_schedule", None)
    return "uniform" in getattr(windows, "name", "")
