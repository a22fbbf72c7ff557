"""The judges whose models are transformers: one of pictures, one of videos."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.fidelity import denoiser, picture_transformer, video_transformer
from benchmarks.fidelity.pictures import Judge, batch_of_crops


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
