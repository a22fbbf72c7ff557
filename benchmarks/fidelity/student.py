"""A judge of few steps: the transformer of scenes, distilled to four, as turbo models are.

The teacher goes from one of five noise levels to the next in several small steps, with guidance.
The student, which starts as the teacher, learns to get there in one step without guidance
(progressive distillation in one round). Where the teacher's way ends is decided by where it starts,
so the student has nothing to average over, and pictures stay sharp.

    python -m benchmarks.fidelity.student --minutes 30      train, or continue training
"""

import math
from itertools import pairwise
from pathlib import Path

from benchmarks.host import use_cpu

if __name__ == "__main__":
    use_cpu()

import torch
from torch import Tensor

from benchmarks.fidelity import scene_transformer
from benchmarks.fidelity.networks import differentiable
from benchmarks.fidelity.training import Training, below, run

WEIGHTS = Path(__file__).with_name("student.npz")
STATE = scene_transformer.STATES / "student-training.pt"

STEPS = 4
SMALL_STEPS = 4
"""Of the teacher, for each of the student."""

GUIDANCE = 3.0


def levels(steps: int) -> list[float]:
    """The noise levels of a run, from 1 to 0, spaced as the host's *simple* schedule has them."""
    ratio = math.exp(scene_transformer.SHIFT)
    even = [1 - step / steps for step in range(steps + 1)]
    return [ratio * each / (1 + (ratio - 1) * each) for each in even]


class Trainer(Training):
    """The training of the student, on latents of half the side, some of the full."""

    def __init__(self, rate: float, full_share: float):
        model, base = scene_transformer.trained(), scene_transformer.WEIGHTS
        super().__init__(model, rate, full_share, STATE, WEIGHTS, base)
        self.teacher = scene_transformer.trained().requires_grad_(False)
        self.data = scene_transformer.Scenes(self.generator)

    def loss(self) -> tuple[int, Tensor]:
        """The loss of a random batch, and the side of its latents."""
        full = scene_transformer.LATENT_SIDE
        side, size = (full, 2) if self.is_full_size() else (full // 2, 8)
        clean, prompts = self.data.batch(size, side)
        step = below(STEPS, self.generator)
        way = levels(STEPS * SMALL_STEPS)[step * SMALL_STEPS : (step + 1) * SMALL_STEPS + 1]
        noise = torch.randn(clean.shape, generator=self.generator)
        start = (1 - way[0]) * clean + way[0] * noise
        with scene_transformer.attention_of(side):
            with torch.no_grad():
                stop = self._taught(start, way, prompts)
            with differentiable():
                answer = self.model(start, torch.full((size,), way[0]), prompts)
        # A flow is the change over the noise level.
        return side, (answer - (start - stop) / (way[0] - way[-1])).square().mean()

    def _taught(self, latent: Tensor, way: list[float], prompts: Tensor) -> Tensor:
        """Where the teacher gets from ``latent``, along noise levels that fall."""
        both = torch.cat([prompts, torch.zeros_like(prompts)])
        for level, following in pairwise(way):
            times = torch.full((len(both),), level)
            told, untold = self.teacher(latent.repeat(2, 1, 1, 1), times, both).chunk(2)
            flow = untold + GUIDANCE * (told - untold)
            latent = latent + (following - level) * flow
        return latent


if __name__ == "__main__":
    run("Train the student of few steps, or continue.", Trainer)
