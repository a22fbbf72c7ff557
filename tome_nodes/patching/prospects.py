"""What merging would save under other settings, or in a larger picture."""

from dataclasses import dataclass

from .. import reasons
from ..settings.config import ToMeConfig
from ..settings.presets import FREE, PRESETS
from ..strategies.plan import Grid
from . import model as models
from .evaluation import Observer
from .model import PatchedModel

_TIMES = (1.25, 1.5, 2.0)
"""How much wider and higher a picture may become for merging to be worth it."""


@dataclass(frozen=True)
class Prospects:
    """What would help where too little would merge.

    Attributes:
        fast: the share of the work that merging would save under preset *fast*; None if that is
            too little, too.
        times: how many times as wide and high the picture would have to be; None if that is more
            than twice.
    """

    fast: float | None = None
    times: float | None = None

    @property
    def advice(self) -> str:
        """What to do, the least change first."""
        if self.fast is not None:
            return reasons.take_fast(f"under which merging saves {self.fast:.0%} of the work")
        return reasons.take_larger(self.times)


def prospects_of(model: PatchedModel, latent: Grid, obstacle: str) -> Prospects | None:
    """What would help a model on a latent on which nothing merged.

    None unless the obstacle is that too little would merge; other obstacles say what to do.
    """
    if not obstacle.endswith(reasons.WORTH_IT):
        return None
    config, fast = model.config, None
    if config.grows and config.scope == "module":
        free = {name: getattr(config, name) for name in FREE}
        settings = ToMeConfig(**free, **PRESETS["fast"].options)
        other = PatchedModel(settings, model.record, model.model, Observer())
        fast = other.saved(latent) if _is_worth_it(other, latent) else None
    larger = (
        times
        for times in _TIMES
        if _is_worth_it(model, Grid(round(latent.height * times), round(latent.width * times)))
    )
    return Prospects(fast, next(larger, None))


def _is_worth_it(model: PatchedModel, latent: Grid) -> bool:
    """Whether merging would save enough on a latent."""
    saved = model.saved(latent)
    if saved is None:
        return latent.downsampled(model.shallowest).tokens >= model.least_tokens
    return saved > 0 and saved >= (models.LEAST_SAVED if model.config.grows else 0)
