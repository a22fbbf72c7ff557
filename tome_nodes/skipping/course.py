"""How answers go on as noise falls, and how much a forecast takes over.

The best guess of a Gaussian picture of power S under noise grows as the root of S * snr / (1 + S *
snr), where snr is the ratio of signal to noise. What is coarse in a picture has much power: it has
arrived when what is fine still grows. So each of the two goes on along a curve of its own. Where
steps are small, as in a long run, curves are nearly straight, and a line does.
"""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from .steps import LONG, ForecastStep

_DAMPING = 0.7
"""The share of the change that a curve foretells that a forecast contains."""

_CELL = 4
"""What is coarse is the mean of cells of so many positions a side."""

_LEAST = 1e-9
"""A curve that changes by less has arrived."""


@dataclass(frozen=True)
class Shares:
    """How many times the last change is added, to what is fine and what is coarse in it."""

    fine: float = 0.0
    coarse: float = 0.0

    def of(self, change: Tensor) -> Tensor:
        """The shares of a change, ``[..., height, width]``; of any form if both are the same."""
        if self.fine == self.coarse:
            return change * self.fine
        return (change * self.fine).add_(_coarse(change), alpha=self.coarse - self.fine)


@dataclass(frozen=True)
class Course:
    """How answers go on.

    Attributes:
        fine, coarse, whole: the logarithms of power whose curves the fine and the coarse parts of
            an answer go along, and the whole of it; None for a straight line.
        most: a forecast adds at most this many times the last change.
        response: the share of an error in the noisy latent that shows in the model's answer.
    """

    fine: float | None
    coarse: float | None
    whole: float | None
    most: float
    response: float

    def shares(self, first: ForecastStep, last: ForecastStep, now: ForecastStep) -> Shares:
        """How many times a forecast adds the change from a first to a last answer."""
        fine, coarse = (
            min(_DAMPING * _ratio(power, last, now, first, last), self.most)
            for power in (self.fine, self.coarse)
        )
        return Shares(fine, coarse)

    def place(self, last: ForecastStep, between: ForecastStep, now: ForecastStep) -> float:
        """Where a step lies on the way from the last answer to the one now, from 0 to 1."""
        return _ratio(self.whole, last, between, last, now)


STRAIGHT = Course(None, None, None, most=3.0, response=0.7)
"""At the start of a run with a high shift, noise levels are so close that the line would lead far
away."""

CURVED = Course(fine=1.0, coarse=5.0, whole=3.0, most=0.8, response=1.0)
"""What has a smaller error on the judges of pictures in 4 to 12 steps (benchmarks/FIDELITY.md)."""


def course_of(step: ForecastStep, latent: Tensor, is_settled: bool) -> Course:
    """How answers go on: along curves in short runs of pictures that are not there from the start,
    unless the sampler adds noise.

    The step is any of the run, and the noisy latent ``[batch, channels, height, width]``, with
    frames before the height if it is a video. Tokens and sounds have no height and width.
    """
    is_picture = latent.ndim > 3 and latent.shape[2:-2].numel() == 1
    may_curve = step.may_curve and step.count < LONG
    return CURVED if is_picture and not is_settled and may_curve else STRAIGHT


def _ratio(power: float | None, *steps: ForecastStep) -> float:
    """The way between two steps over that between two others, on the curve of some power."""
    begin, end, other_begin, other_end = (_reached(power, step.log_snr) for step in steps)
    return (end - begin) / max(other_end - other_begin, _LEAST)


def _reached(power: float | None, log_snr: float) -> float:
    return log_snr if power is None else math.sqrt(1 / (1 + math.exp(-power - log_snr)))


def _coarse(change: Tensor) -> Tensor:
    """What is coarse in a change, of the same form."""
    height, width = change.shape[-2:]
    planes = change.flatten(0, -3)[None]
    means = F.avg_pool2d(planes, _CELL, ceil_mode=True, count_include_pad=False)
    smooth = F.interpolate(means, scale_factor=_CELL, mode="bilinear", align_corners=False)
    return smooth[..., :height, :width].reshape(change.shape)
