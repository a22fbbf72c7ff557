"""Try settings on a model of ComfyUI: how long it takes to evaluate, and how its answers change.

The model is evaluated at a few noise levels of an unpatched run, each time as a sampler does it,
with everything that other nodes put around it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from statistics import mean, median_low
from typing import Any

import comfy.sample
import torch
from comfy.model_management import (
    InterruptProcessingException,
    throw_exception_if_processing_interrupted,
)
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy.samplers import KSAMPLER, KSampler
from comfy.utils import ProgressBar
from torch import Tensor

from ...ops.clock import Clock
from ...patching.schedule import is_noise_alone
from ...settings.config import ToMeConfig
from ...settings.presets import settings_of
from ...tuning.search import BALANCED, FAST, Candidate, Ladder, Measured
from ...tuning.trial_steps import full_steps, trial_steps
from .. import attachment
from ..network_wrapper import innermost, is_wrapped

log = logging.getLogger("tome_nodes")

HOST_NAMES: Mapping[str, list[str]] = {
    "sampler_name": KSampler.SAMPLERS,
    "scheduler": KSampler.SCHEDULERS,
}
"""The names that the host has for samplers and schedulers; other nodes add to them."""

_UNPATCHED_AGAIN = 2
"""Unpatched evaluations after each trial, of which the last counts."""

_LEAST_BUDGET = 8
"""Evaluations that are allowed even where two runs have fewer."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """A sampling run, with the inputs of the host's KSampler."""

    positive: Any
    negative: Any
    latent_image: Mapping[str, Any]
    seed: int
    steps: int
    cfg: float
    sampler_name: str
    scheduler: str
    denoise: float


@dataclass(frozen=True, eq=False)
class Answer:
    """An evaluation of a model.

    Attributes:
        denoised: what it made of the noisy latent.
        seconds: how long it took.
    """

    denoised: Tensor
    seconds: float


class _OutOfBudget(Exception):
    """There are not enough evaluations left."""


class _Reached:
    """Tells whether evaluations get as far as the network of a model: other nodes may skip it."""

    _KEY = "tome_nodes_reached"

    def __init__(self) -> None:
        self.is_reached = False

    def watched(self, model: ModelPatcher) -> ModelPatcher:
        """A clone of a model whose evaluations are followed."""
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, self._KEY, self._apply_model)
        return clone

    def _apply_model(
        self,
        executor: WrapperExecutor,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        if is_wrapped(executor.class_obj, options):
            options = innermost(self._network, self._KEY, options)
        else:
            self.is_reached = True
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

    def _network(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        self.is_reached = True
        return executor(*args, **kwargs)


class Trials:
    """Trials of settings on one model, for one sampling run, shown as progress of the node.

    Attributes:
        steps: of the run, at least 1.
        shape: that of the latent, with all its samples.
        evaluations: how often the model was evaluated.
        from_noise: whether the run begins with noise alone.
    """

    def __init__(
        self,
        model: ModelPatcher,
        sampling: Sampling,
        clock: Clock | None = None,
    ):
        self._model = attachment.detach(model)
        self._sampling = sampling
        self._clock = clock or Clock(model.load_device)
        sampler = KSampler(
            self._model,
            sampling.steps,
            model.load_device,
            sampling.sampler_name,
            sampling.scheduler,
            sampling.denoise,
            self._model.model_options,
        )
        self._sigmas: Tensor = sampler.sigmas
        self._latent = _latent_for(self._model, sampling.latent_image)
        self._noise = _noise_for(self._latent, sampling)
        self.steps = len(self._sigmas) - 1
        self.shape = tuple(_parts(self._latent)[0].shape)
        self.evaluations = 0
        # As often as two runs of a sampler that evaluates the model once a step.
        self._budget = max(2 * self.steps, _LEAST_BUDGET)
        self._progress = ProgressBar(self._budget)
        self._noisy: dict[int, Tensor] = {}
        self._plain: dict[int, Answer] = {}
        self._unpatched: list[float] = []
        sampling_of_model = self._model.get_model_object("model_sampling")
        self.from_noise = attachment.is_empty(self._latent) or is_noise_alone(
            float(self._sigmas[0]), float(sampling_of_model.sigma_max)
        )
        config = ToMeConfig(**settings_of(FAST[0].preset, {}))
        self._trial_steps = trial_steps(config, self.steps, self.from_noise)

    @torch.no_grad()
    def measure(self, candidate: Candidate) -> Measured | None:
        """Try some settings; None if there are not enough evaluations left.

        Raises:
            InterruptProcessingException: the user stopped it.
        """
        config = ToMeConfig(**settings_of(candidate.preset, {"ratio": candidate.ratio}))
        try:
            if not self._plain:
                self._walk()
            return self._measured(candidate, config)
        except _OutOfBudget:
            return None

    def _measured(self, candidate: Candidate, config: ToMeConfig) -> Measured:
        full = full_steps(config, self.steps, self.from_noise)
        before = {step - 1 for step in self._trial_steps} & {*full}
        steps = sorted({*self._trial_steps} | before)
        left = self._budget - self.evaluations - _UNPATCHED_AGAIN
        if left < len(steps):
            raise _OutOfBudget
        patched = attachment.attach(self._model, config, is_quiet=True)
        try:
            if len(self._trial_steps) == 1 and left >= 2 * len(steps):
                # A first evaluation may compile.
                self._answers(patched, steps)
            answers = self._answers(patched, steps)
            self._unpatched.append(self._time_unpatched())
        except (InterruptProcessingException, _OutOfBudget):
            raise
        except Exception as error:
            # The sampler would fail in the same way: another preset may do better.
            log.warning("[ToMe] %s: %s: %s", candidate, type(error).__name__, error)
            return self._failed(f"{type(error).__name__}: {error}")
        merged = {step: answers[step] for step in self._trial_steps}
        on_all = {step: answers[step] for step in before}
        share = len(full) / self.steps if on_all else 0.0
        run = attachment.last_run(patched)
        change = (share * self._square(on_all) + (1 - share) * self._square(merged)) ** 0.5
        if not isfinite(change):
            return self._failed("the model's answers are not finite")
        unpatched = mean(self._unpatched[-2:])
        on_all_seconds = _seconds(on_all)
        if len(on_all) == 1:
            # It may compile, and merging keys there is not slower.
            on_all_seconds = min(on_all_seconds, unpatched)
        return Measured(
            share * on_all_seconds + (1 - share) * _seconds(merged),
            unpatched,
            change,
            "nothing was evaluated" if run is None else run.obstacle,
        )

    def _failed(self, obstacle: str) -> Measured:
        seconds = self._unpatched[-1]
        return Measured(seconds, seconds, 0.0, obstacle, has_failed=True)

    def _walk(self) -> None:
        """Find the unpatched model's answers at the steps of a run."""
        steps = sorted({0, *self._trial_steps, *(step - 1 for step in self._trial_steps if step)})
        self._plain = self._answers(self._model, steps)
        # What is done once in a run, such as encoding the picture of a ControlNet, is in the first.
        warm = [self._plain[step].seconds for step in steps[1:]]
        self._unpatched.append(median_low(warm) if warm else self._time_unpatched())

    def _time_unpatched(self) -> float:
        step = self._trial_steps[len(self._trial_steps) // 2]
        return self._answers(self._model, [step] * _UNPATCHED_AGAIN)[step].seconds

    def _answers(self, model: ModelPatcher, steps: Sequence[int]) -> dict[int, Answer]:
        """The answers of a model at some steps, in a run of its own.

        Nodes that skip evaluations answer with what they have kept in a run. From the first such
        answer on, another run goes on, which begins one step before.

        Raises:
            RuntimeError: other code answers where nothing can have been kept.
            _OutOfBudget: there are not enough evaluations left for further runs.
        """
        answers: list[Answer] = []
        while len(answers) < len(steps):
            first = max(0, len(answers) - 1)
            if self.evaluations + len(steps) - first > self._budget:
                raise _OutOfBudget
            new = self._answers_in_a_run(model, steps[first:])[len(answers) - first :]
            if not new:
                raise RuntimeError("other code answers in place of the model")
            answers += new
        return dict(zip(steps, answers, strict=True))

    def _answers_in_a_run(self, model: ModelPatcher, steps: Sequence[int]) -> list[Answer]:
        """The answers at some steps, up to the first that is not of the model's network.

        The noisy latent of a step is that of the first model that was evaluated there: it comes
        from the answer before it as with Euler's sampler, in few large steps.
        """
        answers: list[Answer] = []
        reached = _Reached()

        def sample(
            denoise: Callable[..., Tensor],
            x: Tensor,
            sigmas: Tensor,
            extra_args: dict[str, Any],
            **others: Any,
        ) -> Tensor:
            for step, following in zip(steps, [*steps[1:], self.steps], strict=True):
                noisy = self._noisy.setdefault(step, x)
                noise_level = sigmas[step] * noisy.new_ones(len(noisy))
                reached.is_reached = False
                answer = self._timed(partial(denoise, noisy, noise_level, **extra_args))
                if not reached.is_reached:
                    break
                self.evaluations += 1
                self._progress.update(1)
                answers.append(answer)
                sigma, next_sigma = self._sigmas[step], self._sigmas[following]
                x = noisy + (noisy - answer.denoised) / sigma * (next_sigma - sigma)
            return x

        sampling = self._sampling
        comfy.sample.sample_custom(
            reached.watched(model),
            self._noise,
            sampling.cfg,
            KSAMPLER(sample),
            self._sigmas,
            sampling.positive,
            sampling.negative,
            self._latent,
            noise_mask=sampling.latent_image.get("noise_mask"),
            disable_pbar=True,
            seed=sampling.seed,
        )
        return answers

    def _timed(self, denoise: Callable[[], Tensor]) -> Answer:
        """Evaluate a model; raises if the user stopped the workflow."""
        self._clock.wait()
        start = self._clock.now()
        denoised = denoise()
        if not self._clock.can_measure:
            # Reading a number waits for it.
            denoised.flatten()[0].item()
        end = self._clock.now()
        self._clock.wait()
        # The bar asks too, but not each time.
        throw_exception_if_processing_interrupted()
        return Answer(denoised, self._clock.between(start, end))

    def end(self) -> None:
        """Show that there are no more trials."""
        self._progress.update_absolute(self._budget)

    def _square(self, answers: Mapping[int, Answer]) -> float:
        """The mean square of changes, where the variance of the unpatched latent is 1."""
        if not answers:
            return 0.0
        last = self._plain[max(self._plain)]
        variance = float(last.denoised.float().var()) or 1.0
        squares = [
            float((answer.denoised - self._plain[step].denoised).float().square().mean())
            for step, answer in answers.items()
        ]
        return mean(squares) / variance


def _seconds(answers: Mapping[int, Answer]) -> float:
    """The time of one of some answers; that of a first one, which may compile, does not count."""
    return median_low([answer.seconds for answer in answers.values()]) if answers else 0.0


def ladders_for(model: ModelPatcher) -> list[Ladder]:
    """The settings that may be tried on a model.

    Raises:
        ValueError: none, as the model does not belong to a family that can merge tokens.
    """
    return [BALANCED, FAST] if attachment.record_for(model).merges_blocks else [BALANCED]


def _parts(latent: Any) -> list[Tensor]:
    """The tensors of a latent; with sound there are two."""
    return list(latent.unbind()) if latent.is_nested else [latent]


def _latent_for(model: ModelPatcher, given: Mapping[str, Any]) -> Any:
    """The latent with the channels and size that a model takes, as the host's KSampler has it."""
    # An earlier host knows only the first.
    names = {"downscale_ratio_spacial", "downscale_ratio_temporal"} & given.keys()
    ratios = {name: given[name] for name in names}
    return comfy.sample.fix_empty_latent_channels(model, given["samples"], **ratios)


def _noise_for(latent: Any, sampling: Sampling) -> Any:
    """The noise of the host's KSampler, without its change of the global random state."""
    generator = torch.Generator().manual_seed(sampling.seed)
    places = sampling.latent_image.get("batch_index")
    noises = [comfy.sample.prepare_noise_inner(part, generator, places) for part in _parts(latent)]
    return NestedTensor(noises) if latent.is_nested else noises[0]
