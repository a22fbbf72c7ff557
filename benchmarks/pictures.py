"""The judge of pictures: a trained denoiser paints the same seeds with merging and without."""

import statistics
import time
from typing import Any

import comfy.sample
import numpy as np
import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from benchmarks import denoiser
from benchmarks.photos import Crop, photo

GUIDANCE = 2.0
MOST_PSNR = 99.0
"""Stands for the infinite ratio of equal pictures."""


class PictureJudge:
    """Samples with the trained denoiser, plain and patched."""

    def __init__(self, steps: int, seeds: int):
        self.steps = steps
        self.crops = denoiser.held_out_crops(len(denoiser.NAMES) * seeds)
        self._taken: list[float] = []
        self.model = denoiser.load()
        # The first of the wrappers, so that those of the methods are inside.
        self.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "judge", self._clock)
        photos = {name: photo(name, denoiser.SHORT_SIDE) for name in denoiser.NAMES}
        held_out = denoiser.held_out_crops(100)
        self.real = torch.stack([crop.of(photos[crop.photo]) for crop in held_out])
        self.expected = self.pictures(self.model)

    def _clock(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = executor(*args, **kwargs)
        self._taken.append(time.perf_counter() - start)
        return result

    def pictures(self, patched: ModelPatcher) -> Tensor:
        """``[pictures, 3, 64, 64]`` from 0 to 1, a few seeds for each photo."""
        batches = []
        for seed, first in enumerate(range(0, len(self.crops), len(denoiser.NAMES))):
            batches.append(self._sample(patched, first, self.steps, seed))
        return denoiser.to_pixels(torch.cat(batches))

    def _sample(self, patched: ModelPatcher, first: int, steps: int, seed: int = 0) -> Tensor:
        crops = self.crops[first : first + len(denoiser.NAMES)]
        empty = torch.zeros(len(crops), 3, denoiser.SIDE, denoiser.SIDE)
        return comfy.sample.sample(
            patched,
            comfy.sample.prepare_noise(empty, seed),
            steps,
            GUIDANCE,
            "dpmpp_2m",
            "karras",
            _conditioning(crops, with_prompt=True),
            _conditioning(crops, with_prompt=False),
            empty,
            disable_pbar=True,
            seed=seed,
        )

    def paint(self, patched: ModelPatcher) -> tuple[Tensor, list[float]]:
        """What :meth:`pictures` returns, and the seconds of each evaluation of the model."""
        self._taken.clear()
        pictures = self.pictures(patched)
        return pictures, [*self._taken]

    def seconds(self, patched: ModelPatcher) -> float:
        """Seconds of an evaluation: cond and uncond of a picture of each photo."""
        self._taken.clear()
        self._sample(patched, 0, 1)
        return self._taken[0]

    def measure(self, patched: ModelPatcher) -> tuple[dict[str, float], Tensor]:
        """The figures of a method by name, and its pictures."""
        pictures = self.pictures(patched)
        pairs = [
            (ours.permute(1, 2, 0).numpy(), plain.permute(1, 2, 0).numpy())
            for ours, plain in zip(pictures, self.expected, strict=True)
        ]
        figures = {
            "error": (pictures - self.expected).square().mean().sqrt().item(),
            "psnr": statistics.mean(
                float(peak_signal_noise_ratio(plain, ours, data_range=1))
                if np.abs(plain - ours).max() > 1e-4
                else MOST_PSNR
                for ours, plain in pairs
            ),
            "ssim": statistics.mean(
                float(structural_similarity(plain, ours, channel_axis=2, data_range=1))
                for ours, plain in pairs
            ),
            "spectrum": (_spectrum(pictures) - _spectrum(self.expected)).abs().mean().item(),
            "distance": frechet_distance(_features(pictures), _features(self.real)),
        }
        return figures, pictures


def _conditioning(crops: list[Crop], with_prompt: bool) -> list[list[Any]]:
    prompts = [denoiser.prompt(crop.photo if with_prompt else None) for crop in crops]
    return [[torch.stack(prompts), {"crops": crops}]]


def _spectrum(pictures: Tensor) -> Tensor:
    """Power by frequency in decades, averaged over directions, channels and pictures."""
    power = torch.fft.fft2(pictures).abs().square().mean((0, 1))
    side = power.shape[0]
    frequencies = torch.fft.fftfreq(side) * side
    radius = (frequencies[:, None] ** 2 + frequencies[None] ** 2).sqrt().round().long()
    rings = torch.zeros(side).index_add_(0, radius.flatten(), power.flatten())
    counts = torch.zeros(side).index_add_(0, radius.flatten(), torch.ones(side * side))
    return (rings / counts.clamp_min(1))[1 : side // 2].clamp_min(1e-8).log10()


def _features(pictures: Tensor) -> np.ndarray:
    """Features of a fixed random network at each place of the pictures, ``[positions, 16]``."""
    generator = torch.Generator().manual_seed(1)
    x = pictures * 4 - 2
    for channels, inputs in ((32, 3), (32, 32), (16, 32)):
        filters = torch.randn(channels, inputs, 3, 3, generator=generator) / (9 * inputs) ** 0.5
        x = F.leaky_relu(F.conv2d(x, filters, stride=2, padding=1), 0.2) * 1.4
    return x.permute(0, 2, 3, 1).flatten(0, 2).numpy().astype(np.float64)


def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    """The Fréchet distance of Gaussians with the mean and covariance of ``[samples, features]``."""
    means = first.mean(0), second.mean(0)
    one, two = np.cov(first, rowvar=False), np.cov(second, rowvar=False)
    # The root of the product has the same trace as the root of this symmetric matrix.
    values, vectors = np.linalg.eigh(one)
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T
    overlap = np.sqrt(np.linalg.eigvalsh(root @ two @ root).clip(0)).sum()
    return float(((means[0] - means[1]) ** 2).sum() + np.trace(one + two) - 2 * overlap)
