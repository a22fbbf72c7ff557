"""A family of transformers in one record: what adding one takes, tried on a real model's class.

The record is of Z-Image: text and picture in one sequence, keys that are turned by position, so
that they merge where attention is called.
"""

import comfy.model_patcher
import comfy.sample
import comfy.supported_models
import pytest
import torch
from common import Shuffle, relative_error
from host import merging, overridden

from tome_nodes.core.grid import Grid
from tome_nodes.core.layout import Layout, Span
from tome_nodes.core.site import Part, StackSite
from tome_nodes.hosts.comfyui import families
from tome_nodes.hosts.comfyui.attachment import attach
from tome_nodes.hosts.comfyui.family import ComfyBlock, ComfyFamily

TEXT, TEXT_CHANNELS, LAYERS = 20, 32, 3


class ZImageBlock(ComfyBlock):
    merges_at_call = True

    def parts(self):
        return [Part(self.module.attention, "merge_attn", attends_to_itself=True)]

    def layout(self, x, *args, **kwargs):
        latent, model = self.stack.sites.evaluation.latent, self.stack.sites.model
        grid = Grid(-(-latent.height // model.patch_size), -(-latent.width // model.patch_size))
        multiple = model.pad_tokens_multiple or 1
        padded = -(-grid.tokens // multiple) * multiple
        return Layout(x.shape[1], (Span(x.shape[1] - padded, grid),))

    def needs_all_tokens(self, *args, **kwargs):
        return True


class ZImageStack(StackSite):
    block_class = ZImageBlock


class ZImage(ComfyFamily):
    model_class = "comfy.ldm.lumina.model.NextDiT"
    stack_class = ZImageStack

    def stacks(self, model):
        yield "layers", model.layers, model.layers

    def blocks_by_level(self, model):
        return {model.patch_size: len(model.layers)}


@pytest.fixture(autouse=True)
def with_the_record(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, ZImage()))


@pytest.fixture(scope="module")
def model():
    settings = comfy.supported_models.ZImage(
        {
            "image_model": "lumina2",
            "patch_size": 2,
            "in_channels": 16,
            "dim": 288,
            "n_layers": LAYERS,
            "n_refiner_layers": 1,
            "n_heads": 12,
            "n_kv_heads": 12,
            "multiple_of": 16,
            "qk_norm": True,
            "cap_feat_dim": TEXT_CHANNELS,
            "axes_dims": [8, 8, 8],
            "axes_lens": [64, 64, 64],
            "rope_theta": 256.0,
            "ffn_dim_multiplier": 8 / 3,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 32,
        }
    )
    settings.set_inference_dtype(torch.float32, None)
    device = torch.device("cpu")
    base = settings.get_model({}, device=device)
    generator = torch.Generator().manual_seed(0)
    for parameter in base.parameters():
        deviation = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, deviation, generator=generator)
    return comfy.model_patcher.ModelPatcher(base, device, device)


def sample(model, size=(16, 24), steps=2):
    empty = torch.zeros(1, 16, *size)
    generator = torch.Generator().manual_seed(5)
    prompts = [[[torch.randn(1, TEXT, TEXT_CHANNELS, generator=generator), {}]] for _ in range(2)]
    noise = comfy.sample.prepare_noise(empty, 1)
    return comfy.sample.sample(
        model, noise, steps, 4.0, "euler", "simple", *prompts, empty, disable_pbar=True, seed=1
    )


def keys_only(**options):
    return merging(strategy="window", attn_tokens="k,v", **options)


@pytest.mark.parametrize("size", [(16, 24), (14, 18), (15, 17)], ids=str)
def test_a_lossless_plan_reproduces_the_unpatched_model(model, told, size):
    expected = sample(model, size)
    assert relative_error(sample(attach(model, keys_only(), Shuffle), size), expected) < 1e-5
    tokens = TEXT + 12 + -(-(-(-size[0] // 2) * -(-size[1] // 2)) // 32) * 32
    assert told()[-1].startswith(
        f"[ToMe] merged {LAYERS}/{LAYERS} blocks ({tokens} -> {tokens} tokens)"
    )
    assert overridden(model) == []


def test_merging_changes_the_picture_a_little_and_reproducibly(model, told):
    plain = sample(model)
    merged = sample(attach(model, keys_only()))
    assert 1e-4 < relative_error(merged, plain) < 0.5
    assert torch.equal(sample(attach(model, keys_only())), merged)
    assert torch.equal(sample(attach(model, keys_only(ratio=0.0))), plain)
    assert torch.equal(sample(model), plain)
    # Of 96 tokens of the picture 48 merge; 32 of text stay.
    assert told()[0].startswith(f"[ToMe] merged {LAYERS}/{LAYERS} blocks (128 -> 80 tokens)")


def test_merged_keys_are_weighed_next_to_text(model):
    plain = sample(model)
    weighed, unweighed = (
        relative_error(sample(attach(model, keys_only(proportional_attn=on))), plain)
        for on in (True, False)
    )
    assert weighed < unweighed


def test_an_override_that_ignores_its_function_gets_fewer_keys(model, told):
    from comfy.ldm.modules.attention import attention_basic

    lengths = []

    def theirs(_, q, k, v, *args, **kwargs):
        lengths.append((q.shape[2], k.shape[2], v.shape[2]))
        return attention_basic(q, k, v, *args, **kwargs)

    other = model.clone()
    other.model_options["transformer_options"]["optimized_attention_override"] = theirs
    sample(attach(other, keys_only()), steps=1)
    assert lengths.count((128, 80, 80)) == LAYERS
    assert told()[-1].endswith(
        "merged keys weigh as one token (another node replaces the attention function)"
    )


def test_torch_compile_makes_one_graph_of_it(model):
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from torch._dynamo.testing import CompileCounter

    expected = sample(attach(model, keys_only()))
    compiled = attach(model, keys_only())
    graphs = CompileCounter()
    torch._dynamo.reset()
    try:
        set_torch_compile_wrapper(compiled, backend=graphs, fullgraph=True)
        assert relative_error(sample(compiled), expected) < 1e-5
        assert graphs.frame_count == 1
    finally:
        torch._dynamo.reset()


def test_without_its_record_the_model_is_refused(model, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"is for UNet models .* and this model is a NextDiT$"):
        attach(model, keys_only())
