"""The attach to the real modules and samplers of latent-diffusion, with random weights."""

import pytest
import torch
from common import (
    DEVICE,
    check_lossless,
    check_run,
    in_every_scope,
    input_lengths,
    merged_everywhere,
    relative_error,
    theirs_and_ours,
)
from ldm.models.diffusion.ddim import DDIMSampler
from ldm.models.diffusion.plms import PLMSSampler
from ldm.modules.attention import BasicTransformerBlock
from ldm.modules.diffusionmodules.openaimodel import UNetModel
from ldm.modules.diffusionmodules.util import make_beta_schedule
from torch import nn

import tome_nodes
from tome_nodes.python.ldm import LdmUNets

pytestmark = [
    pytest.mark.newest_only,
    # ldm is of 2022.
    pytest.mark.filterwarnings(
        *(f"ignore::{category}:ldm" for category in ("DeprecationWarning", "FutureWarning"))
    ),
]

GRID = (12, 16)
TOKENS = 12 * 16
TEXT_CHANNELS = 32
ROUNDING = 5e-5


class BlockOfVersion1(BasicTransformerBlock):
    """A block of the first release, which has no option to attend to text instead of itself."""

    def _forward(self, x, context=None):
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context=context)
        return x + self.ff(self.norm3(x))


class LatentDiffusion(nn.Module):
    """The model interface of ldm's samplers; the real one needs pytorch-lightning 1.4."""

    num_timesteps = 1000
    parameterization = "eps"
    device = DEVICE

    def __init__(self, unet):
        super().__init__()
        self.model = nn.Module()
        self.model.diffusion_model = unet
        betas = make_beta_schedule("linear", self.num_timesteps, 0.00085, 0.012)
        alphas = torch.cumprod(1 - torch.as_tensor(betas), 0)
        self.betas = torch.as_tensor(betas, device=DEVICE)
        self.alphas_cumprod = alphas.float()
        self.alphas_cumprod_prev = torch.cat([torch.ones(1), alphas[:-1].float()])

    def apply_model(self, x, t, c):
        return self.model.diffusion_model(x, t, context=c)


SHARED = {
    **{"image_size": 64, "in_channels": 4, "out_channels": 4, "model_channels": 32},
    **{"num_res_blocks": 1, "attention_resolutions": [1, 2], "channel_mult": (1, 2)},
    **{"use_spatial_transformer": True, "context_dim": TEXT_CHANNELS, "legacy": False},
}
FAMILIES = {
    "sd1": {"num_heads": 4, "use_checkpoint": True},
    "sd2": {"num_head_channels": 8, "use_linear_in_transformer": True},
    "x4_upscaler": {"num_heads": 4, "disable_self_attentions": [True, False]},
}


def make_model(family="sd1"):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNetModel(**SHARED, **FAMILIES[family]).eval()
        # Untrained, its output would be zero.
        for parameter in unet.parameters():
            if not parameter.any():
                parameter.data.normal_(0, 0.1)
    if family == "sd1":
        for module in unet.modules():
            if isinstance(module, BasicTransformerBlock):
                module.__class__ = BlockOfVersion1
                del module.disable_self_attn
    return LatentDiffusion(unet).to(DEVICE)


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, *GRID), (7, TEXT_CHANNELS))
    return [torch.randn(2, *shape, generator=generator).to(DEVICE) for shape in shapes]


@torch.no_grad()
def call(model):
    sample, text = inputs()
    return model.apply_model(sample, torch.full((2,), 500, device=DEVICE), text)


def run(model, sampler, steps=4):
    """A sampling run with classifier-free guidance, by a sampler of ldm."""
    torch.manual_seed(3)
    _, text = inputs()
    guidance = {"unconditional_guidance_scale": 4.0, "unconditional_conditioning": text[1:]}
    return sampler(model).sample(steps, 1, (4, *GRID), text[:1], verbose=False, **guidance)[0]


@in_every_scope
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lossless_plan_reproduces_the_model_in_every_scope(family, options, log_messages):
    check_lossless(make_model(family), call, **options)
    assert merged_everywhere(log_messages()[-1])


@pytest.mark.parametrize(("family", "sampler"), [("sd1", DDIMSampler), ("sd2", PLMSSampler)])
def test_samplers(family, sampler):
    model = make_model(family)
    check_run(model, model, lambda: run(model, sampler))


def test_equal_to_tomesd():
    # It adds the switch that blocks of version 1 lack, and never removes it.
    options = {"ratio": 0.6, "max_downsample": 2, "merge_crossattn": True, "merge_mlp": True}
    theirs, ours = theirs_and_ours(make_model("sd2"), call, options)
    assert relative_error(ours, theirs) < ROUNDING


@pytest.mark.parametrize(
    ("family", "options", "lengths"),
    [
        # The first blocks of the upscaler attend to text instead of themselves.
        ("x4_upscaler", {}, [TOKENS // 2, 7]),
        # Those of version 1 cannot, and have no attribute for it.
        ("sd1", {"attn_tokens": "k,v"}, [TOKENS, TOKENS // 2]),
    ],
)
def test_text_as_context_of_self_attention_is_never_merged(family, options, lengths):
    model = make_model(family)
    block = model.model.diffusion_model.input_blocks[1][1].transformer_blocks[0]
    assert getattr(block, "disable_self_attn", False) == (family == "x4_upscaler")
    tome_nodes.apply_patch(model, **options)
    with input_lengths(block.attn1.to_q, block.attn1.to_k) as actual:
        call(model)
    assert actual == lengths


def test_every_handle_of_a_model_is_accepted():
    model = make_model()
    plain = call(model)
    unet = model.model.diffusion_model
    for handle in (model, model.model, unet, torch.compile(unet, backend="eager")):
        assert tome_nodes.apply_patch(handle) is handle
        assert relative_error(call(model), plain) > 1e-3
        tome_nodes.remove_patch(handle)
        assert torch.equal(call(model), plain)


def test_the_number_of_noise_levels_is_that_of_the_model(log_messages):
    model = make_model()
    for model.num_timesteps in 1000, 2000:
        assert log_messages() == []
        tome_nodes.apply_patch(model, start_percent=0.6)
        call(model)
    assert log_messages()[-1].startswith("[ToMe] merged 3/7 blocks")


@pytest.mark.parametrize(("family", "sampler"), [("sd1", DDIMSampler), ("sd2", PLMSSampler)])
def test_steps_are_shallow_as_the_timesteps_fall(family, sampler, log_messages):
    model = make_model(family)
    unet, ran = model.model.diffusion_model, {"outermost": 0, "middle": 0}
    for name, block in {"outermost": unet.out, "middle": unet.middle_block}.items():

        def count(*_, name=name):
            ran[name] += 1

        # Below a block whose forward is replaced, as its own hooks still run.
        [*block.modules()][-1].register_forward_hook(count)
    plain = run(model, sampler, steps=20)
    calls = ran["outermost"]
    assert ran["middle"] == calls
    tome_nodes.apply_patch(model, 0.6, preset="fast")
    shallow = run(model, sampler, steps=20)
    assert 0 < relative_error(shallow, plain) < 1
    # PLMS asks twice at its second timestep.
    assert calls - (ran["middle"] - calls) == 11
    assert "shallow 11/20 steps" in log_messages()[-1]


@torch.no_grad()
def test_with_its_own_deep_features_a_shallow_call_is_the_whole_one():
    unet = make_model().model.diffusion_model
    sample, text = inputs()
    expected = unet(sample, torch.full((2,), 500), context=text)
    deep = LdmUNets().deep_blocks(unet)
    begun = deep.begin(None)
    unet(sample, torch.full((2,), 500), context=text)
    came = deep.came
    deep.end(begun)
    begun = deep.begin(came)
    assert torch.equal(unet(sample, torch.full((2,), 500), context=text), expected)
    deep.end(begun)
    # What a ControlNet adds to the skips of all blocks would not fit.
    assert LdmUNets().shallow_arguments((sample, 500), {"control": [came]}) is None
