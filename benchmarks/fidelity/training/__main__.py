"""Train a UNet of stickers, or go on with it.

python3 dev.py bench --train stickers [--minutes 35] [--rate 1e-3]
python3 dev.py bench --train stickers_sd15 --minutes 50 --rate 6e-4

It can be stopped at any time. It saves every few minutes and at the end, and goes on from there.
The weights of the first UNet are in the repository, and a new training of either begins from them.
The weights of the second stay in ``demo/``; ``bench --fidelity --only stickers_sd15`` uses them.
"""

import argparse
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.host import use_cpu

use_cpu()

import torch  # noqa: E402
from comfy.ldm.modules.attention import SpatialTransformer  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock, UNetModel  # noqa: E402
from comfy.model_sampling import ModelSamplingDiscrete  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.fidelity import sticker_unet, sticker_unet_sd15  # noqa: E402
from benchmarks.fidelity.training.stickers import Stickers  # noqa: E402
from benchmarks.fidelity.weights import load, save  # noqa: E402
from tools.environment import ROOT  # noqa: E402

_SAVE_EVERY = 180
"""Seconds between two saves."""
_WARM_UP = 50
"""Steps over which the learning rate rises."""
_TO_NOISE = 0.6
"""Noise levels are made of numbers spread evenly between 0 and 1, raised to this power."""
_MOST_WEIGHT = 20
"""The largest weight of the error of a noise level."""


@dataclass(frozen=True)
class Course:
    """What a UNet is trained on.

    Attributes:
        unet: makes the UNet; the host's layers have no initial weights.
        state: the file of the training; git ignores it.
        sizes: sides in tokens of pictures, and how many are in a batch; the last has full size.
        full_share: the share of batches at full size.
        begin: returns the weights to begin with, by name; weights that it leaves out are untrained.
        weights: where the averaged weights go at the end; None if they stay in ``state``.
    """

    unet: Callable[[], UNetModel]
    state: Path
    sizes: Sequence[tuple[int, int]]
    full_share: float
    begin: Callable[[UNetModel], Mapping[str, Tensor]]
    weights: Path | None = None


def course_of(name: str) -> Course:
    """The course of a judge that can be trained."""
    weights = sticker_unet.WEIGHTS
    if name == "stickers_sd15":
        return Course(
            unet=lambda: sticker_unet.untrained(sticker_unet_sd15.UNET).diffusion_model,
            state=sticker_unet_sd15.STATE,
            sizes=((32, 16), (64, 3)),
            full_share=0.25,
            begin=lambda unet: sticker_unet_sd15.grow(unet, load(weights)),
        )
    return Course(
        unet=lambda: sticker_unet.untrained().diffusion_model,
        state=ROOT / "demo" / "sticker-unet.pt",
        sizes=((32, 16), (64, 4)),
        full_share=0.15,
        begin=lambda unet: load(weights) if weights.exists() else {},
        weights=weights,
    )


def untrained(course: Course) -> UNetModel:
    """A UNet to train."""
    unet = course.unet()
    for module in unet.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.GroupNorm | nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    # Residual branches start at zero, so that the deep network trains from the start.
    for module in unet.modules():
        if isinstance(module, ResBlock):
            nn.init.zeros_(module.out_layers[-1].weight)
        elif isinstance(module, SpatialTransformer):
            nn.init.zeros_(module.proj_out.weight)
    nn.init.zeros_(unet.out[-1].weight)
    return unet.requires_grad_(True).to(memory_format=torch.channels_last)


class Training:
    """A UNet in training, the average of its weights, and the optimisers.

    Args:
        course: says which UNet.
        rate: the learning rate.
    """

    def __init__(self, course: Course, rate: float):
        self._course, self._rate, self._file = course, rate, course.state
        self.model, self.steps = untrained(course), 0
        self._optimizers = _optimizers(self.model, rate)
        if self._file.exists():
            kept = torch.load(self._file, weights_only=True)
            self.model.load_state_dict(kept["model"])
            for optimizer, its_state in zip(self._optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(its_state)
            self.average, self.steps = kept["average"], kept["steps"]
        else:
            self.model.load_state_dict(course.begin(self.model), strict=False)
            self.average = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._generator = torch.Generator().manual_seed(self.steps)
        self._data = Stickers(self._generator)
        self._sigmas = ModelSamplingDiscrete().sigmas

    def step(self) -> tuple[int, float]:
        """One update; returns the side of the batch in tokens, and the loss."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * min(1.0, (self.steps + 1) / _WARM_UP)
        is_full = float(torch.rand((), generator=self._generator)) < self._course.full_share
        *smaller, full = self._course.sizes
        side, size = full if is_full else smaller[self.steps % len(smaller)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._loss(size, side)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self.steps += 1
        keep = min(0.998, self.steps / (self.steps + 10))
        for name, value in self.model.state_dict().items():
            self.average[name].lerp_(value, 1 - keep)
        return side, loss.item()

    def _loss(self, size: int, side: int) -> Tensor:
        """The error of noise, at noise levels all over the schedule."""
        latent, prompts = self._data.batch(size, side)
        evenly = (torch.arange(size) + torch.rand(size, generator=self._generator)) / size
        # More levels are high, since it is there that the layout of a picture is decided.
        times = (evenly**_TO_NOISE * len(self._sigmas)).long()
        sigma = self._sigmas[times].view(-1, 1, 1, 1)
        noise = torch.randn(latent.shape, generator=self._generator)
        size_of_input = (sigma**2 + 1).sqrt()
        inputs = (latent + sigma * noise) / size_of_input
        answer = self.model(
            inputs.contiguous(memory_format=torch.channels_last), times, context=prompts
        ).float()
        # An error of the noise, times the size of the input, is an error of the velocity. In nearly
        # pure noise, errors count less, or nothing else would be learnt.
        weight = size_of_input.square().clamp(max=_MOST_WEIGHT)
        return ((answer - noise).square() * weight).mean()

    def save(self) -> None:
        """Write everything; an interrupted write leaves the old file."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "average": self.average,
            "steps": self.steps,
        }
        unfinished = self._file.with_suffix(".part")
        torch.save(state, unfinished)
        os.replace(unfinished, self._file)


def _optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, which takes fewer steps than AdamW; AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if "transformer_blocks." in name and parameter.ndim == 2 else rest).append(
            parameter
        )
    return [
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.99), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]


def main() -> None:
    """Train until the time is up or the process is told to stop."""
    parser = argparse.ArgumentParser(prog="dev.py bench --train", description=__doc__)
    parser.add_argument("name", choices=["stickers", "stickers_sd15"])
    parser.add_argument("--minutes", type=float, default=35)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    arguments = parser.parse_args()
    stop = False

    def ask_to_stop(*_: Any) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    course = course_of(arguments.name)
    training = Training(course, arguments.rate)
    start = saved = time.monotonic()
    losses: dict[int, list[float]] = defaultdict(list)
    while not stop and time.monotonic() - start < 60 * arguments.minutes:
        side, loss = training.step()
        losses[side].append(loss)
        if training.steps % 20 == 0:
            means = "  ".join(f"{s}: {sum(v) / len(v):.4f}" for s, v in sorted(losses.items()))
            minutes = (time.monotonic() - start) / 60
            print(f"{minutes:6.1f} min  step {training.steps}  loss {means}", flush=True)
            losses.clear()
        if time.monotonic() - saved > _SAVE_EVERY:
            training.save()
            saved = time.monotonic()
    training.save()
    if course.weights is not None:
        save(training.average, course.weights)
    print(f"saved after {training.steps} steps", flush=True)


if __name__ == "__main__":
    main()
