"""The attach to the real modules and samplers of latent-diffusion, with random weights."""

import contextlib
import functools
import io

import ldm.modules.attention
import pytest
import tomesd
import torch
from common import (
    DEVICE,
    EVERYTHING,
    TOMESD_OPTIONS,
    Shuffle,
    attributes,
    input_lengths,
    merged_everywhere,
    relative_error,
    scopes_and_tokens,
    theirs_and_ours,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ldm.models.diffusion.ddim import DDIMSampler
from ldm.models.diffusion.plms import PLMSSampler
from ldm.modules.attention import BasicTransformerBlock
from ldm.modules.diffusionmodules.util import GroupNorm32, make_beta_schedule
from models.ldm import TEXT_CHANNELS, make_unet
from torch import nn

import tome_nodes
from tome_nodes.pytorch.ldm import LdmUNets
from tome_nodes.pytorch.patched_model import Attachment
from tome_nodes.settings.config import ToMeConfig

pytestmark = [
    pytest.mark.newest_only,
    # ldm is of 2022.
    pytest.mark.filterwarnings(
        *(f"ignore::{category}:ldm" for category in ("DeprecationWarning", "FutureWarning"))
    ),
]

GRID = (12, 16)
TOKENS = 12 * 16
ROUNDING = 5e-5


class BlockOfVersion1(BasicTransformerBlock):
    """A block of the first release, which has no option to attend to text instead of itself."""

    def _forward(self, x, context=None):
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context=context)
        return x + self.ff(self.norm3(x))


class MaskedBlock(BasicTransformerBlock):
    """A block as in forks that attend only to every second token of the picture."""

    def _forward(self, x, context=None):
        mask = (torch.arange(x.shape[1], device=x.device) % 2 == 0).expand(len(x), -1)
        x = x + self.attn1(self.norm1(x), mask=mask)
        x = x + self.attn2(self.norm2(x), context=context)
        return x + self.ff(self.norm3(x))


class Wrapper(nn.Module):
    """The wrapper of a latent-diffusion UNet; the real one needs pytorch-lightning 1.4."""

    def __init__(self, unet):
        super().__init__()
        self.diffusion_model = unet

    def forward(self, x, t, c_crossattn):
        return self.diffusion_model(x, t, context=torch.cat(c_crossattn, 1))


class LatentDiffusion(nn.Module):
    """The model interface of ldm's samplers; the real one needs pytorch-lightning 1.4."""

    num_timesteps = 1000
    parameterization = "eps"
    device = DEVICE

    def __init__(self, unet):
        super().__init__()
        self.model = Wrapper(unet)
        betas = make_beta_schedule("linear", self.num_timesteps, 0.00085, 0.012)
        alphas = torch.cumprod(1 - torch.as_tensor(betas), 0)
        self.betas = torch.as_tensor(betas, device=DEVICE)
        self.alphas_cumprod = alphas.float()
        self.alphas_cumprod_prev = torch.cat([torch.ones(1), alphas[:-1].float()])

    def apply_model(self, x, t, c):
        return self.model(x, t, [c])


FAMILIES = {
    "sd1": {"num_heads": 4, "use_checkpoint": True},
    "sd2": {"num_head_channels": 8, "use_linear_in_transformer": True},
    "x4_upscaler": {"num_heads": 4, "disable_self_attentions": [True, False]},
}


def make_model(family="sd1"):
    """A model of a family, the same each time, that changes its input substantially."""
    unet = make_unet(**FAMILIES[family])
    if family == "sd1":
        for module in unet.modules():
            if isinstance(module, BasicTransformerBlock):
                module.__class__ = BlockOfVersion1
                del module.disable_self_attn
    return LatentDiffusion(unet).to(DEVICE)


def inputs(batch=2, grid=GRID):
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, *grid), (7, TEXT_CHANNELS))
    return [torch.randn(batch, *shape, generator=generator).to(DEVICE) for shape in shapes]


@torch.no_grad()
def call(model, timestep=500, **options):
    """One evaluation of a model."""
    dtype = model.model.diffusion_model.dtype
    sample, text = (each.to(dtype) for each in inputs(**options))
    return model.apply_model(sample, torch.full((len(sample),), timestep, device=DEVICE), text)


def run(model, sampler, steps=4):
    """A sampling run with classifier-free guidance, by a sampler of ldm."""
    torch.manual_seed(3)
    _, text = inputs()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        latent, _ = sampler(model).sample(
            steps,
            1,
            (4, *GRID),
            text[:1],
            verbose=False,
            unconditional_guidance_scale=4.0,
            unconditional_conditioning=text[1:],
        )
    return latent


def shuffle(model, **options):
    """Attach the lossless plan to a model."""
    config = ToMeConfig(**{"ratio": 0.5, **EVERYTHING, **options})
    Attachment(config, LdmUNets(), 1000, Shuffle).attach(model.model.diffusion_model)


@scopes_and_tokens
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lossless_plan_reproduces_the_model_in_every_scope(
    family, scope, attn_tokens, log_messages
):
    model = make_model(family)
    expected = call(model)
    shuffle(model, scope=scope, attn_tokens=attn_tokens)
    assert relative_error(call(model), expected) < ROUNDING
    assert merged_everywhere(log_messages()[-1])


@pytest.mark.parametrize("sampler", [DDIMSampler, PLMSSampler])
@pytest.mark.parametrize("family", ["sd1", "sd2"])
def test_samplers(family, sampler):
    model = make_model(family)
    before, expected = attributes(model), run(model, sampler)
    state = torch.get_rng_state()
    shuffle(model)
    assert relative_error(run(model, sampler), expected) < ROUNDING
    assert tome_nodes.apply_patch(model) is model
    merged = run(model, sampler)
    assert relative_error(merged, expected) > 1e-3
    assert torch.equal(run(model, sampler), merged)
    assert torch.equal(torch.get_rng_state(), state)
    assert tome_nodes.remove_patch(model) is model
    assert attributes(model) == before
    assert torch.equal(run(model, sampler), expected)


@functools.cache
def exact_model(family):
    """A model in which no two similarities are almost equal."""
    model = make_model(family).double()
    unet = model.model.diffusion_model
    unet.dtype = torch.float64
    unet.time_embed.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    for module in unet.modules():
        if isinstance(module, GroupNorm32):
            # It computes in float32 whatever its input.
            module.__class__ = nn.GroupNorm
    return model


@settings(max_examples=30)
@given(
    TOMESD_OPTIONS,
    # tomesd adds the switch that blocks of version 1 lack, and never removes it.
    st.sampled_from(["sd2", "x4_upscaler"]),
    st.integers(1, 3),
    # The last level of this UNet has half the side length, and ldm upsamples by doubling.
    st.tuples(st.integers(4, 7), st.integers(4, 7)),
)
def test_equal_to_tomesd_for_each_of_its_options(options, family, batch, halves):
    grid = (2 * halves[0], 2 * halves[1])
    model = exact_model(family)
    with pytest.MonkeyPatch.context() as patch:
        # By default, its attention computes in float32 whatever its input.
        patch.setattr(ldm.modules.attention, "_ATTN_PRECISION", "as given")
        evaluate = functools.partial(call, batch=batch, grid=grid)
        theirs, ours = theirs_and_ours(model, evaluate, options)
    assert relative_error(ours, theirs) < 1e-10


def test_equal_to_tomesd_on_blocks_of_version_1():
    model = make_model("sd1")
    tome_nodes.apply_patch(model, use_rand=False, merge_crossattn=True, merge_mlp=True)
    ours = call(model)
    tome_nodes.remove_patch(model)
    plain = call(model)
    tomesd.apply_patch(model, use_rand=False, merge_crossattn=True, merge_mlp=True)
    assert relative_error(call(model), ours) < ROUNDING
    assert relative_error(plain, ours) > 1e-3


def test_the_log_says_if_attention_cannot_weigh_its_keys(log_messages):
    model = make_model()
    tome_nodes.apply_patch(model)
    as_tomesd = call(model)
    tome_nodes.apply_patch(model, proportional_attn=True)
    assert torch.equal(call(model), as_tomesd)
    assert ["weigh as one token" in line for line in log_messages()] == [False, True]


def test_text_as_context_of_self_attention_is_never_merged():
    model = make_model("x4_upscaler")
    block = model.model.diffusion_model.input_blocks[1][1].transformer_blocks[0]
    assert block.disable_self_attn
    tome_nodes.apply_patch(model)
    with input_lengths(block.attn1.to_q, block.attn1.to_k) as lengths:
        call(model)
    assert lengths == [TOKENS // 2, 7]


def test_every_handle_of_a_model_is_accepted():
    model = make_model()
    handles = (model, model.model, model.model.diffusion_model)
    expected = None
    for handle in handles:
        assert tome_nodes.apply_patch(handle) is handle
        expected = call(model) if expected is None else expected
        assert torch.equal(call(model), expected)
        tome_nodes.remove_patch(handle)
        assert not torch.equal(call(model), expected)


def test_the_number_of_noise_levels_is_that_of_the_model(log_messages):
    model = make_model()
    tome_nodes.apply_patch(model, start_percent=0.6)
    call(model, timestep=500)
    assert log_messages() == []
    model.num_timesteps = 2000
    tome_nodes.apply_patch(model, start_percent=0.6)
    call(model, timestep=500)
    assert log_messages()[-1].startswith("[ToMe] merged 3/7 blocks")


def test_gradient_checkpointing_is_left_alone(log_messages):
    model = make_model("sd1")

    def gradients():
        model.zero_grad()
        sample, text = inputs()
        model.apply_model(
            sample, torch.tensor([500, 500], device=DEVICE), text
        ).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    tome_nodes.apply_patch(model)
    assert all(map(torch.equal, gradients(), expected))
    assert log_messages() == [
        "[ToMe] nothing merged: gradient checkpointing runs the transformer blocks again outside "
        "of the model's call"
    ]


def test_a_masked_attention_runs_on_all_tokens(log_messages):
    model = make_model("sd2")
    unmasked = call(model)
    for module in model.modules():
        if isinstance(module, BasicTransformerBlock):
            module.__class__ = MaskedBlock
    expected = call(model)
    assert relative_error(expected, unmasked) > 1e-3
    tome_nodes.apply_patch(model, max_downsample=8)
    assert torch.equal(call(model), expected)
    assert log_messages() == [
        "[ToMe] nothing merged: other code masks the attention or changes its tokens"
    ]


def test_torch_compile(fresh_compiler):
    from torch._dynamo.testing import CompileCounter

    model, graphs = make_model("sd2"), CompileCounter()
    unet = model.model.diffusion_model
    tome_nodes.apply_patch(model, scope="stack")
    expected = [call(model, timestep) for timestep in (900, 600)]
    model.model.diffusion_model = torch.compile(unet, backend=graphs)
    tome_nodes.apply_patch(model, scope="stack")
    for timestep, result in zip((900, 600), expected, strict=True):
        assert relative_error(call(model, timestep), result) < ROUNDING
    assert graphs.frame_count > 0


def test_models_without_a_unet_are_refused():
    broken = make_model()
    del broken.model.diffusion_model
    with pytest.raises(TypeError, match=r"this is a LatentDiffusion$"):
        tome_nodes.apply_patch(broken)
