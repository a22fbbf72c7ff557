"""How diffusers' transformers call their blocks, and are called, by their classes.

All of them predict a flow: the change of the latent as the timestep grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..patching.merge_attention import WholeBlock


@dataclass(frozen=True, kw_only=True)
class FlowTransformer:
    """How the transformers of one class are called.

    Attributes:
        blocks: how they are called, by the attribute that holds them.
        at_end: whether the pictures are at the end of the sequence, as after text, or at its start.
        timesteps: that of a latent without noise, and that of noise alone.
        side: that of the square of pixels that a token of the latent holds, if the transformer gets
            tokens.
        absent: arguments with which a call is not about one latent, unless they are None.
    """

    blocks: Mapping[str, WholeBlock]
    at_end: bool
    timesteps: tuple[float, float]
    side: int = 1
    absent: tuple[str, ...] = ()


_FLUX = WholeBlock("hidden_states", {"image_rotary_emb": 0}, returned=1)


def _hunyuan(positions: str) -> WholeBlock:
    """A block of HunyuanVideo, by the name of its positions."""
    first = "hidden_states", "encoder_hidden_states", "temb", "attention_mask", positions
    return WholeBlock(
        "hidden_states",
        {positions: 0, "attention_mask": -1},
        absent=("token_replace_emb",),
        returned=0,
        names=(*first, "token_replace_emb", "num_tokens"),
    )


_RECORDS: Mapping[str, FlowTransformer] = {
    "FluxTransformer2DModel": FlowTransformer(
        blocks={"transformer_blocks": _FLUX, "single_transformer_blocks": _FLUX},
        at_end=True,
        timesteps=(0.0, 1.0),
        side=2,
    ),
    "Flux2Transformer2DModel": FlowTransformer(
        blocks={
            "transformer_blocks": _FLUX,
            # Text is in the same argument.
            "single_transformer_blocks": WholeBlock("hidden_states", {"image_rotary_emb": 0}),
        },
        at_end=True,
        timesteps=(0.0, 1.0),
        side=2,
        absent=("kv_cache_mode",),
    ),
    "SD3Transformer2DModel": FlowTransformer(
        # The positions are in the tokens.
        blocks={"transformer_blocks": WholeBlock("hidden_states", returned=1)},
        at_end=False,
        timesteps=(0.0, 1000.0),
    ),
    "QwenImageTransformer2DModel": FlowTransformer(
        blocks={
            "transformer_blocks": WholeBlock(
                "hidden_states", {"image_rotary_emb": 0}, absent=("modulate_index",), returned=1
            )
        },
        at_end=True,
        timesteps=(0.0, 1.0),
        side=2,
        # With it, further pictures are layers.
        absent=("additional_t_cond",),
    ),
    "ZImageTransformer2DModel": FlowTransformer(
        blocks={"layers": WholeBlock("x", {"freqs_cis": 1}, absent=("attn_mask", "noise_mask"))},
        at_end=False,
        timesteps=(1.0, 0.0),
    ),
    "Lumina2Transformer2DModel": FlowTransformer(
        blocks={"layers": WholeBlock("hidden_states", {"image_rotary_emb": 1})},
        at_end=True,
        timesteps=(1.0, 0.0),
    ),
    "WanTransformer3DModel": FlowTransformer(
        blocks={"blocks": WholeBlock("hidden_states", {"rotary_emb": 1})},
        at_end=False,
        timesteps=(0.0, 1000.0),
    ),
    "LTXVideoTransformer3DModel": FlowTransformer(
        blocks={"transformer_blocks": WholeBlock("hidden_states", {"image_rotary_emb": 1})},
        at_end=False,
        timesteps=(0.0, 1000.0),
    ),
    "HunyuanVideoTransformer3DModel": FlowTransformer(
        blocks={
            "transformer_blocks": _hunyuan("freqs_cis"),
            "single_transformer_blocks": _hunyuan("image_rotary_emb"),
        },
        at_end=False,
        timesteps=(0.0, 1000.0),
    ),
}


def flow_transformer(network: nn.Module) -> FlowTransformer | None:
    """How a transformer is called, None if that is not known."""
    kinds: Any = type(network).__mro__
    own = next(kind for kind in kinds if kind.__module__.startswith("diffusers."))
    return _RECORDS.get(own.__name__)
