"""The judges of flows and of stickers, and what each judge is asked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from benchmarks.fidelity import (
    latents,
    options,
    scene_transformer,
    sticker_unet,
    sticker_unet_sd15,
    video_transformer,
)
from benchmarks.fidelity.meter import attention_share
from benchmarks.fidelity.options import Option
from benchmarks.fidelity.pictures import HighResolutionJudge, Judge, PictureJudge


class FlowJudge(Judge):
    """A judge of held-out prompts, whose model is a flow; the noise decides everything else."""

    scheduler = "simple"
    decode = staticmethod(latents.decode)
    prompts: Tensor
    empty: Tensor

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return self.empty, self.prompts, {}


class SceneJudge(FlowJudge):
    """The judge whose model is the Flux of :mod:`benchmarks.fidelity.scene_transformer`.

    Args:
        pictures: how many it paints, at most four.
        weights: the file with the weights of the model.
        others: as for :class:`Judge`.
    """

    # As in Flux with a picture of 1024x1024.
    attention = attention_share(4096, width=3072, linear=12)

    def __init__(
        self,
        steps: int,
        pictures: int = 4,
        weights: Path = scene_transformer.WEIGHTS,
        **others: Any,
    ):
        side = scene_transformer.LATENT_SIDE
        self.prompts = scene_transformer.held_out("prompts")[:pictures]
        self.empty = torch.zeros(len(self.prompts), latents.CHANNELS, side, side)
        self.tokens = (side // scene_transformer.PATCH) ** 2 + self.prompts.shape[1]
        super().__init__(scene_transformer.load(weights), steps, **others)


class StickerJudge(Judge):
    """The judge whose model is a UNet of stickers.

    Args:
        load: makes the model.
        pictures: how many it paints, each of another kind of sticker.
        others: as for :class:`Judge`.
    """

    scheduler = "karras"
    decode = staticmethod(sticker_unet.decode)

    def __init__(
        self,
        steps: int,
        guidance: float = 5.0,
        pictures: int = 8,
        load: Callable[[], ModelPatcher] = sticker_unet.load,
        **others: Any,
    ):
        asked = [(index, index % sticker_unet.CLOUDS) for index in range(pictures)]
        self._prompts = torch.stack([sticker_unet.prompt(*each) for each in asked])
        super().__init__(load(), steps, guidance, **others)

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        sides = sticker_unet.SIDE, sticker_unet.SIDE
        return torch.zeros(len(self._prompts), latents.CHANNELS, *sides), self._prompts, {}


class StickerSecondPassJudge(StickerJudge):
    """The same model over its own pictures of half the sides, scaled up."""

    denoise = 0.5

    def __init__(
        self, steps: int, load: Callable[[], ModelPatcher] = sticker_unet.load, **others: Any
    ):
        super().__init__(steps, load=load, **others)
        first = StickerJudge(20, pictures=len(self._prompts), load=load)
        picture = first.latent(self.model, shrunk=2)
        self._begin = F.interpolate(picture, scale_factor=2.0, mode="bicubic")

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return self._begin, self._prompts, {}


class SecondPassJudge(SceneJudge):
    """The model of scenes in a second pass, over a smaller picture scaled up as a latent."""

    denoise = 0.5

    def __init__(self, steps: int):
        first = SceneJudge(steps)
        small = first.latent(first.model, shrunk=2)
        super().__init__(steps)
        self.empty = F.interpolate(small, scale_factor=2.0, mode="bicubic")


class EditJudge(FlowJudge):
    """The judge of edits of four scenes."""

    # As in Qwen-Image-Edit with a picture and two references of 1328x1328.
    attention = attention_share(3 * 83**2, width=3072, linear=12)

    def __init__(self, steps: int):
        held_out = scene_transformer.held_out
        self.references = [held_out(name) / 256 for name in ("leaves", "colours")]
        self.prompts = held_out("edit_prompts")
        self.empty = torch.zeros_like(self.references[0])
        side = scene_transformer.LATENT_SIDE // scene_transformer.PATCH
        self.tokens = (1 + len(self.references)) * side**2 + self.prompts.shape[1]
        super().__init__(scene_transformer.load_editor(), steps, guidance=1.0)

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return self.empty, self.prompts, {"reference_latents": self.references}


class VideoJudge(FlowJudge):
    """The judge whose model is the Wan of :mod:`benchmarks.fidelity.video_transformer`."""

    # As in Wan 14B with a video of 480p and 81 frames.
    attention = attention_share(32760, width=5120, linear=4 + 2 + 2 * 2.7)
    decode = staticmethod(video_transformer.decode)

    def __init__(self, steps: int, **others: Any):
        side, frames = video_transformer.SIDE // latents.CELL, video_transformer.FRAMES
        self.prompts = scene_transformer.held_out("prompts")[:2]
        self.empty = torch.zeros(len(self.prompts), latents.CHANNELS, frames, side, side)
        self.tokens = frames * (side // video_transformer.PATCH) ** 2
        super().__init__(video_transformer.load(), steps, **others)


@dataclass(frozen=True)
class Bench:
    """A judge, and what it is asked.

    Attributes:
        make: makes the judge from a number of steps.
        options: returns what a user could pick in place of a run of that many steps.
        steps: the numbers of steps; ``--quick`` uses the first.
    """

    make: Callable[..., Judge]
    options: Callable[[int], Sequence[Option]]
    steps: Sequence[int]


def _pictures(*steps: int, **others: Any) -> Bench:
    return Bench(partial(PictureJudge, **others), options.of_other_runs, steps)


def _stickers(sampler: str, **others: Any) -> Bench:
    judge = partial(StickerJudge, sampler=sampler, **others)
    return Bench(judge, options.of_stickers, (20, 12, 8))


def _second_stickers(sampler: str, **others: Any) -> Bench:
    judge = partial(StickerSecondPassJudge, sampler=sampler, **others)
    return Bench(judge, options.of_stickers, (8,))


_MULTISTEP: Mapping[str, Any] = {"sampler": "res_multistep"}
_FEW = partial(SceneJudge, guidance=1.0, weights=scene_transformer.FEW_STEPS)

BENCHES = {
    "pictures": Bench(PictureJudge, options.of_unet, (12, 20, 8)),
    "pictures_7": _pictures(20, 12, 8, guidance=7.0, photos=2),
    "hires": Bench(HighResolutionJudge, options.of_high_resolution, (8,)),
    "hires_7": Bench(partial(HighResolutionJudge, guidance=7.0), options.of_other_runs, (8,)),
    "stickers": _stickers("dpmpp_2m"),
    "stickers_euler": _stickers("euler"),
    "stickers_sde": _stickers("dpmpp_2m_sde"),
    "stickers_second": _second_stickers("dpmpp_2m"),
    "stickers_second_sde": _second_stickers("dpmpp_2m_sde"),
    "stickers_sd15": _stickers("dpmpp_2m", load=sticker_unet_sd15.load),
    "stickers_sd15_second": _second_stickers("dpmpp_2m", load=sticker_unet_sd15.load),
    "image": Bench(SceneJudge, options.of_transformer, (8, 20)),
    "few": Bench(_FEW, options.of_transformer, (4, 8)),
    "few_multistep": Bench(partial(_FEW, **_MULTISTEP), options.of_transformer, (8,)),
    "second": Bench(SecondPassJudge, options.of_transformer, (8,)),
    "video": Bench(VideoJudge, options.of_transformer, (8, 20)),
    "video_multistep": Bench(partial(VideoJudge, **_MULTISTEP), options.of_transformer, (8, 20)),
    "edit": Bench(EditJudge, options.of_edit, (8, 4)),
}
