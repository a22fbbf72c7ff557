"""Train the small models that judge merging, so that a training can stop and go on at any time."""

import argparse
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity.weights import load, save

_SAVE_EVERY = 180
"""Seconds between two saves."""

_WARM_UP = 50
"""Steps over which the learning rate rises."""


class Training:
    """A model in training: its weights, their average, the optimiser.

    It goes on from the state of an earlier training, or else from the averaged weights that one
    has left. Those of a model that began as another one are saved as what they differ by.

    Attributes:
        model: the model, on the CPU.
        average: the average of its weights over the last steps, by name.
        steps: the number of updates so far.
    """

    def __init__(
        self,
        model: nn.Module,
        rate: float,
        full_share: float,
        state: Path,
        weights: Path,
        base: Path | None = None,
    ):
        self.model = model
        self.steps = 0
        if weights.exists() and not state.exists():
            trained, self.steps = load(weights)
            model.load_state_dict(trained)
        self.average = {name: value.clone() for name, value in model.state_dict().items()}
        self._rate, self._full_share = rate, full_share
        self._state, self._weights, self._base = state, weights, base
        self._optimizers = optimizers(model, rate)
        if state.exists():
            kept = torch.load(state, weights_only=True)
            model.load_state_dict(kept["model"])
            for optimizer, its_state in zip(self._optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(its_state)
            self.average, self.steps = kept["average"], kept["steps"]
        self.generator = torch.Generator().manual_seed(self.steps)

    def is_full_size(self) -> bool:
        """Whether the next batch is one of the share of full size, at random."""
        return happens(self._full_share, self.generator)

    def loss(self) -> tuple[Hashable, Tensor]:
        """The loss of a random batch, and what to report it under."""
        raise NotImplementedError

    def step(self) -> tuple[Hashable, float]:
        """One update; returns the loss before it, and what to report it under."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * min(1.0, (self.steps + 1) / _WARM_UP)
        # Faster, and precise enough for products.
        with torch.autocast("cpu", torch.bfloat16):
            kind, loss = self.loss()
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self.steps += 1
        keep = min(0.999, self.steps / (self.steps + 10))
        for name, value in self.model.state_dict().items():
            self.average[name].lerp_(value, 1 - keep)
        return kind, loss.item()

    def save(self) -> None:
        """Write the state and the averaged weights; an interrupted write leaves the old file."""
        self._state.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "average": self.average,
            "steps": self.steps,
        }
        unfinished = self._state.with_suffix(".part")
        torch.save(state, unfinished)
        os.replace(unfinished, self._state)
        unfinished = self._weights.with_suffix(".part")
        save(self.average, self.steps, unfinished, self._base)
        os.replace(unfinished, self._weights)


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, which takes fewer steps than AdamW; AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_in_block = "blocks." in name and parameter.ndim == 2
        (matrices if is_in_block else rest).append(parameter)
    return [
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.99), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]


def below(limit: int, generator: torch.Generator) -> int:
    """A random number from 0 to below ``limit``."""
    return int(torch.randint(limit, (), generator=generator))


def happens(share: float, generator: torch.Generator) -> bool:
    """Whether something happens that does in a share of cases, at random."""
    return torch.rand((), generator=generator).item() < share


def run(description: str, make: Callable[[float, float], Training]) -> None:
    """The command line of a training: it ends when the time is up or the process is told to.

    Args:
        description: of the command, for its help.
        make: makes the training from the learning rate and the share of steps at full size.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--full-share", type=float, default=0.5, help="share of steps at full size")
    arguments = parser.parse_args()
    stop = False

    def ask_to_stop(*_: Any) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    training = make(arguments.rate, arguments.full_share)
    start = saved = time.monotonic()
    losses: dict[Hashable, list[float]] = defaultdict(list)
    while not stop and time.monotonic() - start < 60 * arguments.minutes:
        kind, loss = training.step()
        losses[kind].append(loss)
        if training.steps % 20 == 0:
            means = "  ".join(f"{kind}: {sum(v) / len(v):.4f}" for kind, v in losses.items())
            minutes = (time.monotonic() - start) / 60
            print(f"{minutes:6.1f} min  step {training.steps}  loss {means}", flush=True)
            losses.clear()
        if time.monotonic() - saved > _SAVE_EVERY:
            training.save()
            saved = time.monotonic()
    training.save()
    print(f"saved after {training.steps} steps", flush=True)
