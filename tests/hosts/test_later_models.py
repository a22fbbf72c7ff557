"""What later hosts do to attention, by doubles (see `CONTRIBUTING.md`)."""

import copy

import pytest
import torch
from comfy.ldm.modules.attention import optimized_attention
from common import relative_error
from host import OVERRIDE, keys_only, shuffle_error, with_override
from models.comfyui import TINY, sample
from torch import nn

from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.models import record_of

PICTURE = 80


class StoredAttention(nn.Module):
    """An attention that is stored with weights, as of ComfyUI 0.38, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def function(self, q, k, v, heads, mask=None, **kwargs):
        self.keys.append(k.shape[-2])
        return optimized_attention(q, k, v, heads, mask=mask, **kwargs)

    # How the pack knows it.
    function.__name__ = "attention_comfy_kitchen_int8"


@pytest.mark.parametrize("kind", ["minimax_h3", "krea2", "wan21"])
def test_an_attention_that_is_stored_with_the_weights_gets_the_merged_keys(
    models, kind, log_messages, monkeypatch
):
    tiny, model = TINY[kind], models(kind)
    expected = sample(attach(model, keys_only()), tiny)
    record = record_of(model.model.diffusion_model)
    stored = StoredAttention()
    for block in model.model.diffusion_model.blocks:
        module = getattr(block, record.attention or "attn")
        monkeypatch.setattr(module, "comfy_attention", stored, raising=False)
    result = sample(attach(model, keys_only()), tiny)
    assert relative_error(result, expected) < 1e-5
    picture = PICTURE * (tiny.frames or 1)
    assert stored.keys
    assert all(keys < tiny.before + picture for keys in stored.keys)
    assert "weigh as one token" not in log_messages()[-1]


def test_a_control_of_minimax_h3_sees_all_tokens(models, log_messages):
    """As MiniMaxH3FunControl, it runs a block of its own on the rows of the model's first one."""
    tiny, model = TINY["minimax_h3"], models("minimax_h3")
    control = copy.deepcopy(model.model.diffusion_model.blocks[0])
    rows = []

    def controlled(args, extra):
        options = {
            name: each for name, each in args["transformer_options"].items() if name != OVERRIDE
        }
        given = args["t_emb"], args["mod_segments"], args["rope_freqs"]
        hint = control(args["img"].clone(), *given, transformer_options=options)
        rows.append(len(hint))
        return {"img": extra["original_block"](args)["img"] + 0.5 * hint}

    other = model.clone()
    other.set_model_patch_replace(controlled, "dit", "double_block", 0)
    plain, changed = (sample(each, tiny, steps=4) for each in (model, other))
    assert relative_error(changed, plain) > 1e-3
    assert shuffle_error(other, tiny, steps=4) < 1e-5
    assert set(rows) == {tiny.before + PICTURE * tiny.frames}
    assert "merged 2/2 blocks" in log_messages()[-1]


@pytest.mark.parametrize("hook", ["override", "patch"])
def test_beside_a_sparse_attention_nothing_merges_and_the_log_says_why(models, log_messages, hook):
    tiny, model = TINY["minimax_h3"], models("minimax_h3")

    def override(func, *args, **kwargs):
        return func(*args, **kwargs)

    def patch(args, extra):
        return extra["original_block"](args)

    override.__module__ = patch.__module__ = "comfy_extras.nodes_sparse_attention"
    sparse = with_override(model, override) if hook == "override" else model.clone()
    if hook == "patch":
        sparse.set_model_patch_replace(patch, "dit", "double_block", 0)
    plain = sample(sparse, tiny)
    assert torch.equal(sample(attach(sparse, keys_only()), tiny), plain)
    assert "nothing merged: Model Sparse Attention needs all keys" in log_messages()[-1]
