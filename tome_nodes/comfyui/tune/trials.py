"""Sample with a ComfyUI model: measure how long a run takes, and how its picture changes.

A trial is a whole run with the user's own sampler, and with everything that other nodes put
around the model. A single step would say little about the final picture: an error in one step may
vanish by the end, or grow.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import Any

import comfy.sample
import torch
from comfy.model_management import InterruptProcessingException
from comfy.model_patcher import ModelPatcher
from comfy.samplers import KSampler
from comfy.utils import ProgressBar
from torch import Tensor

from ...ops.clock import Clock
from ...run import log_line
from ...tuning.search import Measured
from .. import attachment

log = logging.getLogger("tome_nodes")

HOST_NAMES: Mapping[str, list[str]] = {
    "sampler_name": KSampler.SAMPLERS,
    "scheduler": KSampler.SCHEDULERS,
}
"""ComfyUI's own lists of the names of samplers and schedulers, to which other nodes add."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """A sampling run to carry out: the inputs of ComfyUI's KSampler."""

    positive: Any
    negative: Any
    latent_image: Mapping[str, Any]
    seed: int
    steps: int
    cfg: float
    sampler_name: str
    scheduler: str
    denoise: float


class Trials:
    """Trials on one model, for one sampling run. The node shows their progress.

    Attributes:
        plain: the model without ToMe.
        steps: the number of steps of the run, at least 1.
        latent: the latent that the run starts from.
        steps_taken: how many steps the trials have taken so far.
    """

    def __init__(self, model: ModelPatcher, sampling: Sampling, runs: int, clock: Clock | None):
        """Prepare at most ``runs`` runs; ``clock`` is None for the clock of the model's device."""
        self.plain = attachment.detach(model)
        self.steps = sampling.steps
        self.latent = _latent_for(self.plain, sampling.latent_image)
        self.steps_taken = 0
        self._sampling = sampling
        self._clock = clock or Clock(model.load_device)
        self._progress = ProgressBar(runs * self.steps)

    def measure(self, name: str, model: ModelPatcher, steps: int | None = None) -> Measured:
        """A run with a clone of :attr:`plain`, compared with the unpatched run.

        ``name`` is for the log. Without ``steps``, it has as many as the unpatched run.

        Raises:
            InterruptProcessingException: the user stopped the trial.
        """
        steps = steps or self.steps
        plain, times = self._unpatched
        unpatched = _whole(times) / self.steps
        try:
            latent, times = self._sampled(model, steps)
        except InterruptProcessingException:
            raise
        except Exception as error:
            # Others may still work.
            log.warning("[ToMe] %s: %s: %s", name, type(error).__name__, error)
            return _failed(unpatched, f"{type(error).__name__}: {error}")
        change = _distance(latent, plain)
        if not isfinite(change):
            return _failed(unpatched, "the picture is not finite")
        seconds = _whole(times)
        if steps == 1 < self.steps:
            # Its only step includes work that is done once; the unpatched step does not.
            seconds = min(seconds, unpatched)
        obstacle, done = _outcome(model)
        return Measured(seconds / self.steps, unpatched, change, obstacle, done)

    @cached_property
    def _unpatched(self) -> tuple[Tensor, list[float]]:
        return self._sampled(self.plain, self.steps)

    def _sampled(self, model: ModelPatcher, steps: int) -> tuple[Tensor, list[float]]:
        """The final latent, without the sound of a video, and the seconds of every step.

        A run of one step is carried out twice, because the first includes work that is done once.
        """
        if self.steps == 1:
            self._sampled_once(model, steps)
        return self._sampled_once(model, steps)

    def _sampled_once(self, model: ModelPatcher, steps: int) -> tuple[Tensor, list[float]]:
        """Sample as ComfyUI's KSampler does, but leave the global random state as it is."""
        sampling, marks = self._sampling, []

        def mark(_: int, denoised: Tensor, *others: Any) -> None:
            if not self._clock.can_measure:
                # Without a clock for the device, wait for it by reading a number.
                denoised.flatten()[0].item()
            marks.append(self._clock.now())
            self.steps_taken += 1
            self._progress.update(1)

        device = model.load_device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            noise = comfy.sample.prepare_noise(
                self.latent, sampling.seed, sampling.latent_image.get("batch_index")
            )
            self._clock.wait()
            start = self._clock.now()
            latent = comfy.sample.sample(
                *(model, noise, steps, sampling.cfg, sampling.sampler_name, sampling.scheduler),
                *(sampling.positive, sampling.negative, self.latent, sampling.denoise),
                noise_mask=sampling.latent_image.get("noise_mask"),
                callback=mark,
                disable_pbar=True,
                seed=sampling.seed,
            )
            end = self._clock.now()
            self._clock.wait()
        # Some samplers never call the callback.
        moments = [start, *(marks or [end])]
        times = [self._clock.between(*pair) for pair in pairwise(moments)]
        return attachment.picture_of(latent), times

    def end(self) -> None:
        """Show that there are no more trials."""
        self._progress.update_absolute(self._progress.total)


def _whole(times: list[float]) -> float:
    """The seconds of a run, without work that is done once, in its first step.

    That may be loading the model, encoding the picture of a ControlNet, or compiling.
    """
    first, *others = times
    return sum(others) + min(first, max(others, default=first))


def _outcome(model: ModelPatcher) -> tuple[str | None, str]:
    """What did not happen in a model's last run and why, None if all is well; then what did."""
    if not attachment.is_attached(model):
        return None, ""
    run = attachment.last_run(model)
    if run is None:
        return (
            "nothing was done: another node answers in place of the model; remove one of the two",
            "",
        )
    stopped = None if run.stopped is None else f"merging stopped: {run.stopped}"
    return run.nothing or stopped, log_line.done(run.counts)


def _failed(unpatched: float, error: str) -> Measured:
    return Measured(unpatched, unpatched, 0.0, f"the trial failed: {error}")


def _distance(latent: Tensor, plain: Tensor) -> float:
    """The root mean square of the difference, in standard deviations of ``plain``."""
    deviation = float(plain.float().std()) or 1.0
    return float((latent.float() - plain.float()).square().mean().sqrt()) / deviation


def _latent_for(model: ModelPatcher, given: Mapping[str, Any]) -> Any:
    """The latent with the channels and size that a model takes, as in ComfyUI's KSampler."""
    # An earlier ComfyUI knows only the first, and puts only that into latents.
    names = {"downscale_ratio_spacial", "downscale_ratio_temporal"} & given.keys()
    ratios = {name: given[name] for name in names}
    return comfy.sample.fix_empty_latent_channels(model, given["samples"], **ratios)
