"""The noise levels of a run whose steps may be forecast."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .. import reasons
from .samplers import Sampler
from .steps import ForecastStep, is_even, latent_share, log_snr, log_snrs


@dataclass(frozen=True)
class Schedule:
    """The noise levels of a run, and the sampler that goes by them.

    Attributes:
        noises: the noise levels, one more than there are steps.
        is_flow: see :func:`tome_nodes.skipping.steps.log_snr`.
        sampler: what is known of the sampler.
        from_noise: whether the run begins with noise alone, not with a picture under some noise.
        adds_noise: whether the sampler adds noise in its steps. Answers then go on along lines.
    """

    noises: Sequence[float]
    is_flow: bool
    sampler: Sampler
    from_noise: bool
    adds_noise: bool = False

    @cached_property
    def levels(self) -> list[float]:
        """The logarithm of signal to noise of every step."""
        return log_snrs(self.noises[:-1], self.is_flow)

    @property
    def obstacle(self) -> reasons.Reason | None:
        """Why nothing can be forecast under this sampler; None if something can."""
        return self.sampler.obstacle(self.levels)

    def step(
        self,
        index: int,
        noise: float,
        conditions: Hashable,
        is_active: bool,
        follows: Tensor | None,
    ) -> ForecastStep:
        """The step of a number, from 0, for the attributes of :class:`ForecastStep`.

        ``noise`` is the noise level at which the model is asked. ``follows`` is None if it is not
        known.
        """
        share = latent_share(self.noises, index) if self.sampler.corrects else None
        return ForecastStep(
            index=index,
            count=len(self.levels),
            log_snr=log_snr(noise, self.is_flow),
            conditions=conditions,
            latent_share=share,
            is_even=is_even(self.levels, index, self.sampler.faster),
            is_active=is_active,
            follows=follows is None or bool(follows),
            from_noise=self.from_noise,
            may_curve=not self.adds_noise,
        )
