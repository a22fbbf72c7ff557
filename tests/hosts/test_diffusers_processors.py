"""Which attention processors and which pipelines of diffusers merge, kept as tables."""

import importlib
import inspect
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("diffusers", "0.42", reason="the tables are of diffusers 0.42")

import diffusers
import torch
from common import AS_FAST, attributes, merged_everywhere, relative_error, shuffle
from diffusers.models import attention_processor
from diffusers.models.attention import BasicTransformerBlock
from models.pipelines import DEVICE, call, make_unet, noise
from models.unet_pipelines import make

import tome_nodes
from tome_nodes import reasons
from tome_nodes.merging.key_weights import Capabilities, KeyWeights, Ways
from tome_nodes.ops import TORCH
from tome_nodes.python.diffusers_unets import DiffusersUNets

pytestmark = pytest.mark.newest_only

ROUNDING = 5e-5
EVERYWHERE = {"max_downsample": 8, "merge_crossattn": True}
FAST = {**AS_FAST, "proportional_attn": True}

_AND_EXCITE = (
    "deprecated.stable_diffusion_attend_and_excite.pipeline_stable_diffusion_attend_and_excite"
)
_GUIDED_BY_ITSELF = "deprecated.stable_diffusion_sag.pipeline_stable_diffusion_sag"
_VIDEO_ZERO = "deprecated.text_to_video_synthesis.pipeline_text_to_video_zero"
_PIX2PIX_ZERO = "deprecated.stable_diffusion_variants.pipeline_stable_diffusion_pix2pix_zero"
_LEDITS = "ledits_pp.pipeline_leditspp_stable_diffusion"


def elsewhere(module, name, **options):
    """A processor that a pipeline brings along."""
    kind = getattr(importlib.import_module(f"diffusers.pipelines.{module}"), name)
    return partial(kind, **options)


class _Store(SimpleNamespace):
    """Stands for what these processors tell their pipelines."""

    def __call__(self, *args, **kwargs):
        pass


MERGING = {
    "AttnProcessor": attention_processor.AttnProcessor,
    "AttnProcessor2_0": attention_processor.AttnProcessor2_0,
    "SlicedAttnProcessor": partial(attention_processor.SlicedAttnProcessor, 2),
    "XFormersAttnProcessor": attention_processor.XFormersAttnProcessor,
}
"""Self-attentions with these processors merge."""

ON_ALL_TOKENS = {
    "PAGIdentitySelfAttnProcessor2_0": attention_processor.PAGIdentitySelfAttnProcessor2_0,
    "PAGCFGIdentitySelfAttnProcessor2_0": attention_processor.PAGCFGIdentitySelfAttnProcessor2_0,
    "CustomDiffusionAttnProcessor": partial(
        attention_processor.CustomDiffusionAttnProcessor, train_kv=False, train_q_out=False
    ),
    "CustomDiffusionAttnProcessor2_0": partial(
        attention_processor.CustomDiffusionAttnProcessor2_0, train_kv=False, train_q_out=False
    ),
    "CrossAttnStoreProcessor": elsewhere(_GUIDED_BY_ITSELF, "CrossAttnStoreProcessor"),
    "CrossFrameAttnProcessor": elsewhere(_VIDEO_ZERO, "CrossFrameAttnProcessor"),
    "CrossFrameAttnProcessor2_0": elsewhere(_VIDEO_ZERO, "CrossFrameAttnProcessor2_0"),
    "AttendExciteAttnProcessor": elsewhere(
        _AND_EXCITE, "AttendExciteAttnProcessor", attnstore=_Store(), place_in_unet="up"
    ),
    "Pix2PixZeroAttnProcessor": elsewhere(_PIX2PIX_ZERO, "Pix2PixZeroAttnProcessor"),
    "LEDITSCrossAttnProcessor": elsewhere(
        _LEDITS,
        "LEDITSCrossAttnProcessor",
        **{"attention_store": _Store(), "place_in_unet": "up", "pnp": False, "editing_prompts": 1},
    ),
    # Made for other models, and possible here.
    "AllegroAttnProcessor2_0": attention_processor.AllegroAttnProcessor2_0,
    "HunyuanAttnProcessor2_0": attention_processor.HunyuanAttnProcessor2_0,
    "MochiVaeAttnProcessor2_0": attention_processor.MochiVaeAttnProcessor2_0,
    "StableAudioAttnProcessor2_0": attention_processor.StableAudioAttnProcessor2_0,
}
"""Self-attentions with these processors run on all tokens."""

OF_OTHER_KINDS = {
    # Fused projections have a test of their own in test_diffusers.py, and IP-Adapter, too.
    *("FusedAttnProcessor2_0", "IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0"),
    *("IPAdapterXFormersAttnProcessor", "CustomDiffusionXFormersAttnProcessor"),
    # They need other hardware.
    *("AttnProcessorNPU", "XLAFlashAttnProcessor2_0"),
    # For blocks without self-attention over tokens alone, which have no transformer.
    *("AttnAddedKVProcessor", "AttnAddedKVProcessor2_0", "SlicedAttnAddedKVProcessor"),
    *("XFormersAttnAddedKVProcessor",),
    # For transformers.
    *("MochiAttnProcessor2_0", "JointAttnProcessor2_0", "PAGJointAttnProcessor2_0"),
    *("PAGCFGJointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "XFormersJointAttnProcessor"),
    *("AuraFlowAttnProcessor2_0", "FusedAuraFlowAttnProcessor2_0", "CogVideoXAttnProcessor2_0"),
    *("FusedCogVideoXAttnProcessor2_0", "FusedHunyuanAttnProcessor2_0"),
    *("PAGHunyuanAttnProcessor2_0", "PAGCFGHunyuanAttnProcessor2_0", "LuminaAttnProcessor2_0"),
    *("SD3IPAdapterJointAttnProcessor2_0", "SanaMultiscaleAttnProcessor2_0"),
    *("SanaLinearAttnProcessor2_0", "PAGCFGSanaLinearAttnProcessor2_0"),
    *("PAGIdentitySanaLinearAttnProcessor2_0", "FluxAttnProcessor2_0"),
    *("FluxSingleAttnProcessor2_0", "FusedFluxAttnProcessor2_0", "FluxAttnProcessor2_0_NPU"),
    *("FluxIPAdapterJointAttnProcessor2_0", "FusedFluxAttnProcessor2_0_NPU"),
    *("XLAFluxFlashAttnProcessor2_0",),
    # They are empty.
    *("LoRAAttnProcessor", "LoRAAttnProcessor2_0", "LoRAXFormersAttnProcessor"),
    *("LoRAAttnAddedKVProcessor",),
}


@pytest.fixture
def xformers(monkeypatch):
    """PyTorch's attention in place of the one of xformers, which has no release for a CPU."""

    def attend(q, k, v, attn_bias, op, scale):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_bias, scale=scale)

    ops = SimpleNamespace(memory_efficient_attention=attend)
    monkeypatch.setattr(attention_processor, "xformers", SimpleNamespace(ops=ops))


def set_in_self_attention(unet, processor):
    processors = unet.attn_processors
    for name in processors:
        if name.endswith("attn1.processor"):
            processors[name] = processor()
    unet.set_attn_processor(processors)


def test_every_processor_of_diffusers_is_in_a_table():
    found = {
        name
        for name, kind in vars(attention_processor).items()
        if inspect.isclass(kind) and kind.__module__ == attention_processor.__name__
        if "AttnProcessor" in name or "AttnAddedKVProcessor" in name
    }
    assert found - OF_OTHER_KINDS <= MERGING.keys() | ON_ALL_TOKENS.keys()


@torch.no_grad()
@pytest.mark.parametrize("name", MERGING)
def test_what_merges_takes_keys_from_outside_and_weighs_them(name, xformers):
    """As often as the tokens that they stand for; its own tokens from outside change nothing."""
    attention = next(m for m in make_unet().modules() if isinstance(m, BasicTransformerBlock)).attn1
    queries, keys = noise(4, 9, 32), noise(4, 5, 32, seed=2)
    sizes = torch.tensor([3, 1, 4, 1, 2], device=DEVICE)
    ways = Ways(keys.device, keys.dtype, Capabilities())
    weights = KeyWeights(sizes.log().expand(4, -1), TORCH, ways, lambda _: None)
    weighed = DiffusersUNets.family.weigh_keys({}, weights, None)
    expected = attention(queries, encoder_hidden_states=keys.repeat_interleave(sizes, dim=1))
    alone = attention(queries)
    attention.set_processor(MERGING[name]())
    actual = attention(queries, encoder_hidden_states=keys, **weighed)
    assert relative_error(actual, expected) < ROUNDING
    assert relative_error(attention(queries, encoder_hidden_states=keys), expected) > 1e-2
    for given in {}, {"encoder_hidden_states": queries}:
        assert relative_error(attention(queries, **given), alone) < ROUNDING


@pytest.mark.parametrize("name", [*MERGING, *ON_ALL_TOKENS])
def test_a_processor_merges_or_runs_on_all_tokens_and_the_log_says_why(
    name, log_messages, xformers
):
    unet = make_unet()
    set_in_self_attention(unet, (MERGING | ON_ALL_TOKENS)[name])
    # Of a size that is divided by two and by three, as some do.
    run = partial(call, unet, batch=6)
    expected, before = run(), attributes(unet)
    for options in FAST, {"scope": "stack"}, {"attn_tokens": "k,v"}:
        shuffle(unet, **options)
        assert relative_error(run(), expected) < ROUNDING
    for options in {}, {"attn_tokens": "k,v"}, {"proportional_attn": True}, {"scope": "stack"}:
        tome_nodes.apply_patch(unet, **options)
        merged = run()
        line = log_messages()[-1]
        if name in MERGING:
            assert relative_error(merged, expected) > 1e-3
            assert line.startswith("[ToMe] merged 3/7 blocks")
        else:
            assert torch.equal(merged, expected)
            assert line == f"[ToMe] nothing merged: {reasons.unknown_processor(name)}"
    tome_nodes.remove_patch(unet)
    assert attributes(unet) == before
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("scope", ["module", "stack"])
def test_a_block_with_an_unknown_processor_is_left_out_and_the_others_merge(scope, caplog):
    caplog.set_level("INFO", logger="tome_nodes")
    unet = make_unet("sdxl")
    block = unet.down_blocks[2].attentions[0].transformer_blocks[1]
    block.attn1.set_processor(ON_ALL_TOKENS["PAGCFGIdentitySelfAttnProcessor2_0"]())
    expected = call(unet, batch=6)
    shuffle(unet, scope=scope, attn_tokens="k,v", proportional_attn=True)
    assert relative_error(call(unet, batch=6), expected) < ROUNDING
    tome_nodes.apply_patch(unet, scope=scope, max_downsample=4, proportional_attn=True)
    caplog.clear()
    assert relative_error(call(unet, batch=6), expected) > 1e-3
    (line,) = caplog.messages
    assert line.startswith("[ToMe] merged 17/18 blocks")
    why = reasons.unknown_processor("PAGCFGIdentitySelfAttnProcessor2_0")
    assert f"all tokens in the attention of 1 ({why})" in line
    # What the blocks save that merge, as the count of all of them does not hold.
    assert "fewer multiplications in these blocks' self-attention" in line


@torch.no_grad()
@pytest.mark.parametrize("by_position", [False, True])
def test_keys_from_other_code_are_left_alone(log_messages, by_position):
    """As reference pictures are, in pipelines of diffusers' users."""
    unet = make_unet()
    reference = noise(2, 50, 32)

    def give(_, args, kwargs):
        keys = torch.cat([args[0], reference], dim=1)
        if by_position:
            return (args[0], keys, kwargs.pop("attention_mask")), {}
        return args, kwargs | {"encoder_hidden_states": keys}

    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    plain = call(unet)
    attention.register_forward_pre_hook(give, with_kwargs=True)
    expected = call(unet)
    assert relative_error(expected, plain) > 1e-3
    for options in FAST, {"attn_tokens": "k,v", "proportional_attn": True}, {}:
        shuffle(unet, **options)
        assert relative_error(call(unet), expected) < ROUNDING
        assert str(reasons.OTHER_KEYS) in log_messages()[-1]
    # In a stack, all tokens of the block merge, whatever its keys are.
    tome_nodes.apply_patch(unet, scope="stack", proportional_attn=True)
    assert call(unet).isfinite().all()
    assert reasons.CALLED_DIFFERENTLY in log_messages()[-1]


@torch.no_grad()
def test_an_attention_of_other_code_without_a_processor_runs_on_all_tokens(log_messages):
    unet = make_unet()

    class Attention(torch.nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def forward(self, x, encoder_hidden_states=None, attention_mask=None):
            return self.own(x)

    for block in (m for m in unet.modules() if isinstance(m, BasicTransformerBlock)):
        block.attn1 = Attention(block.attn1)
    expected = call(unet)
    tome_nodes.apply_patch(unet, attn_tokens="k,v")
    assert torch.equal(call(unet), expected)
    assert log_messages() == [f"[ToMe] nothing merged: {reasons.unknown_processor('Attention')}"]


_PAG = "PAGCFGIdentitySelfAttnProcessor2_0"

PIPELINES = {
    **dict.fromkeys(
        [
            *("AltDiffusionImg2ImgPipeline", "AltDiffusionPipeline", "KolorsPipeline"),
            *("LatentConsistencyModelImg2ImgPipeline", "LatentConsistencyModelPipeline"),
            *("MarigoldDepthPipeline", "MarigoldNormalsPipeline"),
            "SemanticStableDiffusionPipeline",
            *("StableDiffusionAdapterPipeline", "StableDiffusionControlNetImg2ImgPipeline"),
            *("StableDiffusionControlNetInpaintPipeline", "StableDiffusionControlNetPipeline"),
            *("StableDiffusionDepth2ImgPipeline", "StableDiffusionDiffEditPipeline"),
            *("StableDiffusionGLIGENPipeline", "StableDiffusionGLIGENTextImagePipeline"),
            *("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
            *("StableDiffusionInpaintPipelineLegacy", "StableDiffusionInstructPix2PixPipeline"),
            *("StableDiffusionModelEditingPipeline", "StableDiffusionPanoramaPipeline"),
            *("StableDiffusionParadigmsPipeline", "StableDiffusionPipeline"),
            *("StableDiffusionPipelineSafe", "StableDiffusionUpscalePipeline"),
            *("StableDiffusionXLAdapterPipeline", "StableDiffusionXLControlNetImg2ImgPipeline"),
            *("StableDiffusionXLControlNetInpaintPipeline", "StableDiffusionXLControlNetPipeline"),
            "StableDiffusionXLControlNetUnionImg2ImgPipeline",
            "StableDiffusionXLControlNetUnionInpaintPipeline",
            *("StableDiffusionXLControlNetUnionPipeline", "StableDiffusionXLImg2ImgPipeline"),
            *("StableDiffusionXLInpaintPipeline", "StableDiffusionXLInstructPix2PixPipeline"),
            "StableDiffusionXLPipeline",
        ],
        "merges",
    ),
    **dict.fromkeys(
        [
            *("KolorsPAGPipeline", "StableDiffusionControlNetPAGInpaintPipeline"),
            *("StableDiffusionControlNetPAGPipeline", "StableDiffusionPAGImg2ImgPipeline"),
            *("StableDiffusionPAGInpaintPipeline", "StableDiffusionPAGPipeline"),
            *("StableDiffusionXLControlNetPAGImg2ImgPipeline", "StableDiffusionXLPAGPipeline"),
            *("StableDiffusionXLControlNetPAGPipeline", "StableDiffusionXLPAGImg2ImgPipeline"),
            "StableDiffusionXLPAGInpaintPipeline",
        ],
        _PAG,
    ),
    "StableDiffusionSAGPipeline": "CrossAttnStoreProcessor",
    "StableDiffusionAttendAndExcitePipeline": "AttendExciteAttnProcessor",
    "StableDiffusionPix2PixZeroPipeline": "Pix2PixZeroAttnProcessor",
    "LEditsPPPipelineStableDiffusion": "LEDITSCrossAttnProcessor",
    "LEditsPPPipelineStableDiffusionXL": "LEDITSCrossAttnProcessor",
    "TextToVideoZeroPipeline": "CrossFrameAttnProcessor2_0",
    "TextToVideoZeroSDXLPipeline": "CrossFrameAttnProcessor2_0",
}
"""By pipeline, whether it merges everywhere, or the processor of attentions on all tokens."""

# By the kind of UNet that they make of theirs, or that they need.
REFUSED = {
    "UNetControlNetXSModel": {
        *("StableDiffusionControlNetXSPipeline", "StableDiffusionXLControlNetXSPipeline"),
    },
    "UNetMotionModel": {
        *("AnimateDiffControlNetPipeline", "AnimateDiffPAGPipeline", "AnimateDiffPipeline"),
        *("AnimateDiffSDXLPipeline", "AnimateDiffSparseControlNetPipeline", "PIAPipeline"),
        "AnimateDiffVideoToVideoControlNetPipeline",
        "AnimateDiffVideoToVideoPipeline",
    },
    "blocks without a transformer": {
        *("IFImg2ImgPipeline", "IFImg2ImgSuperResolutionPipeline", "IFInpaintingPipeline"),
        *("IFInpaintingSuperResolutionPipeline", "IFPipeline", "IFSuperResolutionPipeline"),
        *("KandinskyCombinedPipeline", "KandinskyImg2ImgCombinedPipeline"),
        *("KandinskyImg2ImgPipeline", "KandinskyInpaintCombinedPipeline"),
        *("KandinskyInpaintPipeline", "KandinskyPipeline", "KandinskyV22CombinedPipeline"),
        *("KandinskyV22ControlnetImg2ImgPipeline", "KandinskyV22ControlnetPipeline"),
        *("KandinskyV22Img2ImgCombinedPipeline", "KandinskyV22Img2ImgPipeline"),
        *("KandinskyV22InpaintCombinedPipeline", "KandinskyV22InpaintPipeline"),
        *("KandinskyV22Pipeline", "StableDiffusionLatentUpscalePipeline"),
    },
}

NOT_TRIED = {
    # They need further networks: encoders of pictures or sound, a prior or a vocoder.
    *("AudioLDMPipeline", "MusicLDMPipeline", "BlipDiffusionControlNetPipeline"),
    *("BlipDiffusionPipeline", "LDMTextToImagePipeline", "PaintByExamplePipeline"),
    *("StableDiffusionImageVariationPipeline", "StableUnCLIPImg2ImgPipeline"),
    *("StableUnCLIPPipeline", "KolorsImg2ImgPipeline"),
    # It gives no numbers with these weights, with or without merging.
    "CycleDiffusionPipeline",
    # It returns no latent.
    "StableDiffusionLDM3DPipeline",
    # As MarigoldDepthPipeline, with more channels.
    "MarigoldIntrinsicsPipeline",
}


def unet_pipelines():
    """The names of the pipelines whose ``unet`` may be a ``UNet2DConditionModel``."""
    for name in dir(diffusers):
        kind = getattr(diffusers, name, None)
        if inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline):
            unet = inspect.signature(kind.__init__).parameters.get("unet")
            if unet is not None and ".UNet2DConditionModel" in str(unet.annotation):
                yield name


def test_every_pipeline_with_a_unet_is_in_a_table():
    assert {*unet_pipelines()} <= PIPELINES.keys() | NOT_TRIED | set().union(*REFUSED.values())


def processors(unet):
    return {name: type(processor) for name, processor in unet.attn_processors.items()}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_merges_but_for_attentions_that_need_all_tokens(name, log_messages):
    case = make(name)
    expected = case()
    if "LEdits" in name:
        # It leaves other processors behind at first.
        expected = case()
    before = processors(case.network)
    shuffle(case.pipeline, **FAST)
    assert relative_error(case(), expected) < ROUNDING
    lines = log_messages()
    tome_nodes.apply_patch(case.pipeline, **EVERYWHERE, attn_tokens="k,v", proportional_attn=True)
    assert case().isfinite().all()
    tome_nodes.remove_patch(case.pipeline)
    assert processors(case.network) == before
    assert torch.equal(case(), expected)
    if PIPELINES[name] == "merges":
        assert all(merged_everywhere(line) and "all tokens" not in line for line in lines)
    else:
        assert str(reasons.unknown_processor(PIPELINES[name])) in lines[-1]


@pytest.mark.parametrize("kind", REFUSED)
def test_unets_of_other_kinds_and_without_transformer_blocks_are_refused(kind):
    if kind == "UNetMotionModel":
        unet = diffusers.UNetMotionModel.from_unet2d(make_unet())
    elif kind == "UNetControlNetXSModel":
        options = {"size_ratio": 0.5, "ctrl_optional_kwargs": {}}
        unet = diffusers.UNetControlNetXSModel.from_unet(make_unet(layers_per_block=2), **options)
    else:
        blocks = {"down_block_types": ("SimpleCrossAttnDownBlock2D",) * 3}
        blocks |= {"up_block_types": ("SimpleCrossAttnUpBlock2D",) * 3}
        unet = make_unet(**blocks, mid_block_type="UNetMidBlock2DSimpleCrossAttn")
    with pytest.raises(
        TypeError, match=r"this is a (UNetMotionModel|UNetControlNetXSModel)|has none"
    ):
        tome_nodes.apply_patch(unet)
