"""Tiny UNets of latent-diffusion with random weights."""

from typing import Any

import torch
from ldm.modules.diffusionmodules.openaimodel import UNetModel

TEXT_CHANNELS = 32


def make_unet(**options: Any) -> UNetModel:
    """A UNet, the same each time, that changes its input substantially."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNetModel(
            image_size=64,
            in_channels=4,
            out_channels=4,
            model_channels=32,
            num_res_blocks=1,
            attention_resolutions=[1, 2],
            channel_mult=(1, 2),
            use_spatial_transformer=True,
            context_dim=TEXT_CHANNELS,
            legacy=False,
            **options,
        )
        for parameter in unet.parameters():
            if not parameter.any():
                # Untrained, its output would be zero.
                parameter.data.normal_(0, 0.1)
    return unet.eval()
