"""The demo's own pack of nodes: a small trained UNet where a workflow has a checkpoint.

ComfyUI recognises a checkpoint by the shapes of its weights, and it recognises none this small. So
a node makes the model, with stand-ins for its text encoder and its VAE.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.fidelity import sticker_unet

KINDS = (
    *("cat", "strawberry", "car", "ball", "butterfly", "sunflower"),
    *("house", "fish", "pizza", "frog", "tree", "mushroom"),
)
"""The words for the kinds of stickers, in the order of the UNet."""
COLOURS = ("red", "yellow", "green", "cyan", "blue", "purple")
"""The words for the colours of clouds."""


class Vocabulary:
    """Stands in for a text encoder: it finds one kind of sticker and one colour in a text.

    A text without a kind and a colour, such as a negative prompt, counts as no prompt.
    """

    def tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return re.findall("[a-z]+", text.lower())

    def encode_from_tokens_scheduled(self, words: list[str]) -> list[list[Any]]:
        """The conditioning of a prompt of words, as the host's samplers take it."""
        kinds = [KINDS.index(word) for word in words if word in KINDS]
        colours = [COLOURS.index(word) for word in words if word in COLOURS]
        told = torch.zeros(sticker_unet.PROMPT_SHAPE)
        if kinds and colours:
            told = sticker_unet.prompt(kinds[0], colours[0])
        return [[told[None], {}]]


class Decoder:
    """Stands in for a VAE: the latent holds frequencies of pixels, and nothing was learnt."""

    def decode(self, latent: Tensor) -> Tensor:
        """The pictures ``[batch, height, width, 3]`` of a latent, from 0 to 1."""
        return sticker_unet.decode(latent.cpu()).movedim(1, -1)


class Painter:
    """A node in the place of a checkpoint loader, with the same outputs."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """No inputs, in the form that the host asks for."""
        return {"required": {}}

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CLIP", "VAE"), "load", "demo"

    def load(self) -> tuple[Any, Vocabulary, Decoder]:
        """The model, and the stand-ins for its text encoder and its VAE."""
        return sticker_unet.load(), Vocabulary(), Decoder()


NODE_CLASS_MAPPINGS = {"DemoPainter": Painter}
