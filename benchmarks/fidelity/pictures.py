"""Judges of pictures: a trained model paints the same noise with and without merging."""

import statistics
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, ClassVar

import comfy.sample
import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from skimage.metrics import structural_similarity
from torch import Tensor

from benchmarks.fidelity import denoiser


class Judge:
    """Samples with a trained model, plain and patched, and compares the pictures.

    Attributes:
        model: the plain model.
        tokens: the number of tokens of a picture, with those of its prompt if both are in the same
            attention. None for a UNet, where only a part merges.
        attention: the share of attention in the work of a block, in a model that people use.
        denoise: the share of a schedule that is sampled; less than 1 starts from a picture.
        seed: what the noise comes from.
        decode: turns what the model paints into pixels from 0 to 1.
    """

    scheduler: ClassVar[str]
    decode: Callable[[Tensor], Tensor]
    tokens: int | None = None
    attention = 0.0
    denoise = 1.0
    seed = 0

    def __init__(
        self, model: ModelPatcher, steps: int, guidance: float = 3.0, sampler: str = "euler"
    ):
        self.model, self.steps, self.guidance, self.sampler = model, steps, guidance, sampler

    @cached_property
    def expected(self) -> Tensor:
        """The pictures of the plain model."""
        return self.pictures(self.model)

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """What a batch of pictures starts from, its prompts, and its other conditions."""
        raise NotImplementedError

    def pictures(self, patched: ModelPatcher, steps: int | None = None) -> Tensor:
        """What a model paints, in the judge's number of steps unless told another.

        Returns:
            ``[pictures, 3, height, width]`` from 0 to 1; videos have frames before the height.
        """
        return self.decode(self.latent(patched, steps))

    def latent(self, patched: ModelPatcher, steps: int | None = None, shrunk: int = 1) -> Tensor:
        """The latent of the pictures, with its sides divided by ``shrunk``.

        The noise of a smaller latent is the noise of the full size, averaged.
        """
        empty, prompts, others = self.batch()
        noise = comfy.sample.prepare_noise(empty, self.seed)
        if shrunk > 1:
            # The mean of n independent numbers has a deviation smaller by the root of n.
            noise = F.avg_pool2d(noise, shrunk) * shrunk
            empty = torch.zeros_like(noise)
        return comfy.sample.sample(
            patched,
            noise,
            steps or self.steps,
            self.guidance,
            self.sampler,
            self.scheduler,
            [[prompts, others]],
            [[torch.zeros_like(prompts), others]],
            empty,
            denoise=self.denoise,
            disable_pbar=True,
            seed=self.seed,
        )

    def figures(self, pictures: Tensor) -> dict[str, float]:
        """How much pictures differ from the expected ones, and for videos how much they flicker.

        ``flicker`` is the error of the changes from frame to frame over the error of the frames:
        the root of 2 for noise that is new in each frame, 0 for a steady difference.
        """
        frames = [_frames(each).numpy() for each in (self.expected, pictures)]
        figures = {
            "error": rms(pictures - self.expected),
            "ssim": statistics.mean(
                float(structural_similarity(*pair, channel_axis=0, data_range=1))
                for pair in zip(*frames, strict=True)
            ),
        }
        if pictures.ndim == 5 and figures["error"] > 0:
            changes = rms((pictures - self.expected).diff(dim=2))
            figures["flicker"] = changes / figures["error"]
        return figures


class PictureJudge(Judge):
    """The judge whose model is the UNet of :mod:`benchmarks.fidelity.denoiser`.

    It also judges by LPIPS.
    """

    scheduler = "karras"
    decode = staticmethod(denoiser.to_pixels)

    def __init__(
        self,
        steps: int,
        guidance: float = 2.0,
        photos: int = len(denoiser.NAMES),
    ):
        self.photos = photos
        self.crops = denoiser.held_out_crops(self.photos)
        super().__init__(denoiser.load(), steps, guidance, "dpmpp_2m")

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """A crop of each photo."""
        prompts = torch.stack([denoiser.prompt(crop.photo) for crop in self.crops])
        empty = torch.zeros(self.photos, 3, denoiser.SIDE, denoiser.SIDE)
        return empty, prompts, {"crops": self.crops}

    def figures(self, pictures: Tensor) -> dict[str, float]:
        return {
            **super().figures(pictures),
            "lpips": float(lpips(pictures, self.expected).mean()),
        }


class HighResolutionJudge(PictureJudge):
    """The same model in a second pass, over its own picture scaled up to twice the side."""

    denoise = 0.5

    def __init__(self, steps: int, guidance: float = 3.0):
        super().__init__(steps, guidance, photos=1)
        first = PictureJudge(12, guidance, photos=1)
        picture = first.latent(first.model)
        self._begin = F.interpolate(picture, scale_factor=2.0, mode="bicubic")

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """One picture, of the first photo."""
        (crop,) = self.crops
        return self._begin, denoiser.prompt(crop.photo)[None], {"crops": [crop]}


def lpips(pictures: Tensor, expected: Tensor) -> Tensor:
    """The LPIPS of each picture (the shift-tolerant one, arXiv 2207.13686, on AlexNet).

    Both are ``[pictures, 3, height, width]`` from 0 to 1.
    """
    with torch.no_grad():
        # Pixels from -1 to 1.
        return _lpips()(2 * pictures - 1, 2 * expected - 1).flatten()


@cache
def _lpips() -> Callable[[Tensor, Tensor], Tensor]:
    from stlpips_pytorch.stlpips import LPIPS

    made: Callable[[Tensor, Tensor], Tensor] = LPIPS(
        net="alex", variant="shift_tolerant", verbose=False
    )
    return made


def _frames(pictures: Tensor) -> Tensor:
    """The frames of videos as pictures."""
    return pictures if pictures.ndim == 4 else pictures.transpose(1, 2).flatten(0, 1)


def rms(difference: Tensor) -> float:
    """The root of the mean square."""
    return difference.square().mean().sqrt().item()
