"""The UNet of stickers as diffusers has it: the same layers and weights under other names."""

from comfy.utils import unet_to_diffusers
from diffusers import UNet2DConditionModel
from torch import nn

from benchmarks.fidelity import latents, sticker_unet, weights


def load() -> UNet2DConditionModel:
    """The trained UNet, which answers as that of :func:`sticker_unet.load` does."""
    width = sticker_unet.UNET["model_channels"]
    widths = [width * times for times in sticker_unet.UNET["channel_mult"]]
    down = "CrossAttnDownBlock2D"
    up = "CrossAttnUpBlock2D"
    unet = UNet2DConditionModel(
        sample_size=sticker_unet.SIDE,
        in_channels=latents.CHANNELS,
        out_channels=latents.CHANNELS,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("DownBlock2D", down, down),
        up_block_types=(up, up, "UpBlock2D"),
        transformer_layers_per_block=2,
        # diffusers calls the number of heads so.
        attention_head_dim=[each // sticker_unet.UNET["num_head_channels"] for each in widths],
        use_linear_projection=True,
        cross_attention_dim=sticker_unet.PROMPT_SHAPE[1],
        norm_num_groups=width // 8,
    )
    for module in unet.modules():
        if isinstance(module, nn.GroupNorm):
            module.num_groups = module.num_channels // 8
    trained = weights.load(sticker_unet.WEIGHTS)
    names = unet_to_diffusers(sticker_unet.UNET)
    unet.load_state_dict({name: trained[names[name]] for name in unet.state_dict()})
    return unet.eval().requires_grad_(False)
