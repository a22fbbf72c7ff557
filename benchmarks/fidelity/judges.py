"""The judges whose models are transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fidelity import (
    denoiser,
    latents,
    picture_transformer,
    scene_transformer,
    scenes,
    video_transformer,
)
from benchmarks.fidelity.pictures import Judge, batch_of_crops


class SceneJudge(Judge):
    """The judge whose model is the Flux of :mod:`benchmarks.fidelity.scene_transformer`.

    Args:
        pictures: how many it paints for each seed.
        weights: the file with those of the model.
    """

    sampler, scheduler = "euler", "simple"

    def __init__(
        self,
        steps: int,
        seeds: int = 1,
        guidance: float = 3.0,
        scheduler: str | None = None,
        pictures: int = 4,
        weights: Path = scene_transformer.WEIGHTS,
    ):
        seeds_of_scenes = range(scene_transformer.HELD_OUT, scene_transformer.HELD_OUT + pictures)
        self.prompts = torch.stack(
            [scenes.prompt(scenes.caption_of(seed)) for seed in seeds_of_scenes]
        )
        super().__init__(scene_transformer.load(weights), steps, seeds, guidance, scheduler)

    @property
    def tokens(self) -> int:
        """Those of a picture and its prompt."""
        side = scene_transformer.LATENT_SIDE // scene_transformer.PATCH
        return side**2 + self.prompts.shape[1]

    def decode(self, latent: Tensor) -> Tensor:
        """See :func:`benchmarks.fidelity.latents.decode`."""
        return latents.decode(latent)

    def batch(self, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Pictures of held-out captions; the noise decides all else."""
        side = scene_transformer.LATENT_SIDE
        empty = torch.zeros(len(self.prompts), latents.CHANNELS, side, side)
        return empty, self.prompts, {}


class PictureTransformerJudge(Judge):
    """The judge whose model is the Flux of :mod:`benchmarks.fidelity.picture_transformer`."""

    sampler, scheduler = "euler", "simple"

    def __init__(self, steps: int, seeds: int, guidance: float = 2.0, scheduler: str | None = None):
        count = len(denoiser.NAMES) * seeds
        side = picture_transformer.SIDE
        self.crops = denoiser.held_out_crops(count, picture_transformer.SHORT_SIDE, side)
        super().__init__(picture_transformer.load(), steps, seeds, guidance, scheduler)

    def batch(self, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Crops of all photos."""
        return batch_of_crops(self.crops, seed)


class VideoTransformerJudge(Judge):
    """The judge whose model is the Wan of :mod:`benchmarks.fidelity.video_transformer`."""

    sampler, scheduler = "euler", "simple"

    def __init__(self, steps: int, seeds: int, guidance: float = 2.0, scheduler: str | None = None):
        self.clips = video_transformer.judged_clips()
        photos = video_transformer.Photos()
        rendered = [photos.render(clip, video_transformer.SIDE) for clip in self.clips]
        self.places = torch.stack([places for _, places in rendered])
        super().__init__(video_transformer.load(), steps, seeds, guidance, scheduler)

    def batch(self, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """One clip over each photo."""
        prompts = torch.stack([video_transformer.prompt(clip) for clip in self.clips])
        count, _, *sides = self.places.shape
        return torch.zeros(count, 3, *sides), prompts, {"places": self.places}
