"""Do forecasts change a video or its sound more than as many fewer steps? Each is compared alone.

python3 dev.py bench --sound [--scheduler simple] [--denoise 1] [--together]

A tiny model of the host's own class samples a video and its sound, and an exact denoiser answers
for each in place of the network. The rows have the mean change over eight seeds with its standard
deviation, and in brackets the change by as many fewer steps. It takes three minutes on one thread.
With ``--denoise`` below 1, runs begin with a picture and a sound. With ``--together``, decisions
that depend on the model's answers are made from both streams as if they were one.

Both streams of LTX-2 have the noise level of the video. In MiniMax H3, the sound has less noise.
ComfyUI 0.30 samples that sound as it is, so that what the sampler gets is no clean sound. From 0.31
on, the host carries it four times as loud, so that it has the noise of the video. Both ways are run
here on 0.30, where the denoiser stands for all that a model does with its noise level.
"""

import argparse
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from statistics import mean as mean_of
from statistics import stdev
from typing import Any
from unittest import mock

from benchmarks.host import use_cpu

use_cpu()

import comfy.sample  # noqa: E402
import torch  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from comfy.nested_tensor import NestedTensor  # noqa: E402
from comfy.patcher_extension import WrapperExecutor, WrappersMP  # noqa: E402
from models.comfyui import TINY, Tiny, build, conditioning  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.forecasts.denoiser import denoised, denoised_one_of, mean  # noqa: E402
from tome_nodes.comfyui import attachment  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import PRESET, settings_of  # noqa: E402

STEPS = (8, 20, 21, 26)
GUIDANCE = (1.0, 3.0, 5.0)
SEEDS = tuple(range(1, 9))

_SHIFTS = 12.0, 3.0
"""The shifts of the noise levels of MiniMax H3's video and sound."""

_LOUDER = _SHIFTS[0] / _SHIFTS[1]
"""How many times as loud ComfyUI carries its sound from 0.31 on."""

Denoise = Callable[[Tensor, float], Tensor]
"""The best guess of what is in a latent at a noise level."""


def _plain(latent: Tensor, denoise: Denoise, noise: float) -> Tensor:
    """The answer of a flow with the noise level of the video."""
    return (latent - denoise(latent, noise)) / noise


def _as_in_031(latent: Tensor, denoise: Denoise, noise: float) -> Tensor:
    """The same for a sound that is carried four times as loud."""
    own = _own_noise(noise)
    return (latent - _LOUDER * denoise(latent * own / noise, own)) / noise


def _as_in_030(latent: Tensor, denoise: Denoise, noise: float) -> Tensor:
    """The answer of a flow with its own noise level, times how fast it changes with the video's."""
    own = _own_noise(noise)
    return _LOUDER * own / noise**2 * (latent - denoise(latent, own))


def _own_noise(noise: float) -> float:
    """The noise level of MiniMax H3's sound at a noise level of its video."""
    of_video, of_sound = _SHIFTS
    base = noise / (of_video - (of_video - 1) * noise)
    return of_sound * base / (1 + (of_sound - 1) * base)


@dataclass(frozen=True, eq=False)
class Layout:
    """A model of videos with sound.

    Attributes:
        tiny: its tiny instance.
        answer: how it answers for a sound.
        loudness: how many times as loud as a clean sound its latent of sound is.
    """

    tiny: Tiny
    answer: Callable[[Tensor, Denoise, float], Tensor] = _plain
    loudness: float = 1.0


_H3 = replace(TINY["minimax_h3"], frames=4, sound=(32, 2, 64))

LAYOUTS = {
    "LTX-2": Layout(replace(TINY["ltxav"], frames=4, sound=(8, 48, 16))),
    "MiniMax H3, 0.31": Layout(_H3, _as_in_031, _LOUDER),
    "MiniMax H3, 0.30": Layout(_H3, _as_in_030),
}


@cache
def _model(layout: str) -> ModelPatcher:
    return build(LAYOUTS[layout].tiny)


@dataclass(frozen=True)
class Prior:
    """What may be heard.

    Attributes:
        sounds: the number of sounds that the sound may be near to, as with words of a language.
        prompted: how many of these the prompt leaves.
    """

    sounds: int = 1
    prompted: int = 1


PRIORS = {"any sound": Prior(), "one of 32": Prior(32, 4)}

_VARIANCE, _WIDER = 0.8, 1.49
"""The variance of pictures around their mean, and how many times as large it is with no prompt."""

_LOUDNESS, _POWER = 0.3, 1.0
"""The loudness of a sound relative to a picture, and how fast its variance falls with frequency."""


@dataclass(eq=False)
class _Denoiser:
    """Answers in place of a network with two streams, for the prompt of a seed.

    Attributes:
        levels: the noise levels at which it answered.
    """

    layout: Layout
    prior: Prior
    seed: int
    levels: set[float] = field(default_factory=set)

    def answer(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Wrap the network, which never runs."""
        given = inspect.signature(executor.original).bind(*args, **kwargs).arguments
        options = given["transformer_options"]
        noise = float(options["sigmas"].max())
        self.levels.add(noise)
        answers = [
            (
                _plain(picture, partial(self._picture, is_negative), noise),
                self.layout.answer(sound, partial(self._sound, is_negative), noise),
            )
            for picture, sound, is_negative in zip(
                *(stream.split(1) for stream in given["x"]),
                options["cond_or_uncond"],
                strict=True,
            )
        ]
        return [torch.cat(stream) for stream in zip(*answers, strict=True)]

    def start(self) -> list[Tensor]:
        """A picture and a sound to begin with."""
        tiny = self.layout.tiny
        assert tiny.frames is not None and tiny.sound is not None
        picture = mean(self.seed, (1, tiny.channels, tiny.frames, *tiny.size(12, 12)))
        return [picture, self.layout.loudness * self._sounds((1, *tiny.sound), 1)[0]]

    def _picture(self, is_negative: int, latent: Tensor, noise: float) -> Tensor:
        if is_negative:
            return denoised(latent, torch.tensor(0.0), noise, _VARIANCE * _WIDER)
        return denoised(latent, mean(self.seed, tuple(latent.shape)), noise, _VARIANCE)

    def _sound(self, is_negative: int, latent: Tensor, noise: float) -> Tensor:
        prior, variance = self.prior, _VARIANCE * _LOUDNESS**2
        if prior.sounds == 1 and is_negative:
            return denoised(latent, torch.tensor(0.0), noise, variance * _WIDER, _POWER)
        count = prior.sounds if is_negative else prior.prompted
        centres = self._sounds(tuple(latent.shape), count)
        return denoised_one_of(latent, centres, noise, variance, _POWER)

    def _sounds(self, shape: tuple[int, ...], count: int) -> list[Tensor]:
        """The means of the first sounds."""
        return [_LOUDNESS * mean(1000 * self.seed + number, shape) for number in range(count)]


@dataclass(frozen=True)
class Run:
    """A run of euler.

    Attributes:
        layout, prior: the names of the model and of the sounds, in :data:`LAYOUTS` and
            :data:`PRIORS`.
        steps, guidance, scheduler, denoise: how it is sampled.
    """

    layout: str
    prior: str
    steps: int
    guidance: float
    scheduler: str = "simple"
    denoise: float = 1.0

    def sampled(self, seed: int, *, with_ours: bool = False) -> tuple[Sequence[Tensor], int]:
        """The picture and the sound, and in how many steps the network was evaluated."""
        layout, model = LAYOUTS[self.layout], _model(self.layout)
        denoiser = _Denoiser(layout, PRIORS[self.prior], seed)
        if with_ours:
            config = ToMeConfig(**settings_of(PRESET.default, {}))
            model = attachment.attach(model, config, is_quiet=True)
        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "denoiser", denoiser.answer)
        start = denoiser.start()
        latent = NestedTensor([stream * (self.denoise < 1) for stream in start])
        noise = comfy.sample.prepare_noise(latent, seed)
        prompts = [conditioning(layout.tiny, each) for each in (5, 6)]
        sampled = comfy.sample.sample(
            *(model, noise, self.steps, self.guidance, "euler", self.scheduler, *prompts, latent),
            denoise=self.denoise,
            disable_pbar=True,
            seed=seed,
        )
        picture, sound = sampled.unbind()
        return (picture, sound / layout.loudness), len(denoiser.levels)


@dataclass(frozen=True)
class Errors:
    """The results of a run, for each seed.

    Attributes:
        evaluated: in how many steps the network was evaluated.
        ours, fewer: how much forecasts and as many fewer steps change the picture and the sound.
    """

    evaluated: Sequence[int]
    ours: Sequence[Sequence[float]]
    fewer: Sequence[Sequence[float]]

    def in_words(self) -> str:
        """The columns of its row."""
        least, most = min(self.evaluated), max(self.evaluated)
        streams = zip(zip(*self.ours, strict=True), zip(*self.fewer, strict=True), strict=True)
        columns = [f"{_spread(ours)} ({_spread(fewer)})" for ours, fewer in streams]
        return " | ".join([f"{least}" if least == most else f"{least} to {most}", *columns])


def _spread(errors: Sequence[float]) -> str:
    return f"{mean_of(errors):.4f} ± {stdev(errors):.4f}"


def errors_of(asked: Run, seeds: Sequence[int]) -> Errors:
    """The results of a run with our node, and without it in as many steps as ours evaluates."""
    evaluated, ours, fewer = [], [], []
    for seed in seeds:
        plain, _ = asked.sampled(seed)
        with_ours, count = asked.sampled(seed, with_ours=True)
        evaluated.append(count)
        ours.append(_changes(with_ours, plain))
        fewer.append(_changes(replace(asked, steps=count).sampled(seed)[0], plain))
    return Errors(evaluated, ours, fewer)


def _changes(streams: Sequence[Tensor], plain: Sequence[Tensor]) -> list[float]:
    pairs = zip(streams, plain, strict=True)
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


def main() -> None:
    """Make all runs, and print their rows."""
    parser = argparse.ArgumentParser(prog="dev.py bench --sound", description=__doc__)
    parser.add_argument("--scheduler", default="simple")
    parser.add_argument("--denoise", type=float, default=1.0)
    parser.add_argument("--together", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.ERROR)
    together: Any = mock.patch.object(attachment, "sampled_streams", lambda *_: [])
    print("| Model | Sound | Steps | Guidance | Run | Picture | Sound |\n" + "|---" * 7 + "|")
    with together if arguments.together else nullcontext():
        for layout, prior, steps, guidance in product(LAYOUTS, PRIORS, STEPS, GUIDANCE):
            run = Run(layout, prior, steps, guidance, arguments.scheduler, arguments.denoise)
            row = errors_of(run, SEEDS).in_words()
            print(f"| {layout} | {prior} | {steps} | {guidance:g} | {row} |", flush=True)


if __name__ == "__main__":
    main()
