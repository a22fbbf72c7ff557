"""What merging would save under other settings, or in a larger picture."""

from dataclasses import dataclass

from .. import reasons
from ..settings.config import ToMeConfig
from ..settings.presets import FREE, settings_of
from ..strategies.plan import Grid
from .evaluation import Observer
from .model import PatchedModel

_TIMES = (1.25, 1.5, 2.0)
"""How much wider and higher a picture may become for merging to be worth it."""


@dataclass(frozen=True)
class Prospects:
    """What would help where too little would merge.

    Attributes:
        advice: what to do.
        is_preset: whether that is to take preset *fast*, the least change.
    """

    advice: str
    is_preset: bool = False


def prospects_of(model: PatchedModel, latent: Grid, obstacle: str) -> Prospects | None:
    """What would help a model on a latent on which nothing merged.

    None unless the obstacle is that too little would merge; other obstacles say what to do.
    """
    if not obstacle.endswith(reasons.WORTH_IT):
        return None
    config = model.config
    if config.policy.more:
        free = {name: getattr(config, name) for name in FREE}
        settings = ToMeConfig(**settings_of(config.policy.more, free))
        other = PatchedModel(settings, model.record, model.model, Observer())
        saved = other.saved(latent)
        if saved is not None and _is_worth_it(other, latent):
            why = f"under which merging saves {saved:.0%} of the work"
            return Prospects(reasons.take_fast(why), is_preset=True)
    larger = (
        times
        for times in _TIMES
        if _is_worth_it(model, Grid(round(latent.height * times), round(latent.width * times)))
    )
    return Prospects(reasons.take_larger(next(larger, None)))


def _is_worth_it(model: PatchedModel, latent: Grid) -> bool:
    """Whether merging would save enough on a latent."""
    is_large = latent.downsampled(model.shallowest).tokens >= model.least_tokens
    return is_large and model.too_little(latent) is None and model.saved(latent) != 0
