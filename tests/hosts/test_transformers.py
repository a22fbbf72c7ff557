"""Every kind of transformer in ComfyUI: tiny models of its own classes, in its own sampler."""

import importlib
import inspect
import re

import comfy.ldm.flux.model
import comfy.ldm.lightricks.model
import comfy.model_base
import comfy.model_management
import numpy as np
import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy.nested_tensor import NestedTensor
from common import relative_error
from host import (
    calls_of,
    keys_only,
    merged_keys,
    merging,
    needs,
    overridden,
    shuffle_error,
    with_override,
)
from models.comfyui import TEXT, TINY, build, conditioning, sample

from tome_nodes.comfyui.attachment import attach, detach, last_run
from tome_nodes.comfyui.models import record_of
from tome_nodes.comfyui.models.transformers import REFUSED, TRANSFORMERS
from tome_nodes.merging.layout import Grid
from tome_nodes.patching.merge_attention import AttentionBlock
from tome_nodes.report import drawing
from tome_nodes.report.pages import report_of


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def with_sound(mask):
    """The mask of a video and that of all of its sound."""
    return NestedTensor([mask, torch.ones(1, 1, 6, 16)])


every_kind = pytest.mark.parametrize("kind", TINY)


@every_kind
@pytest.mark.parametrize("attn_tokens", ["k,v", "q,k,v"])
def test_a_lossless_plan_reproduces_the_unpatched_model(models, log_messages, kind, attn_tokens):
    tiny, model = TINY[kind], models(kind)
    config = keys_only(attn_tokens=attn_tokens)
    assert shuffle_error(model, tiny, config, size=tiny.size(7, 9)) < 1e-5
    assert log_messages()[-1].startswith(f"[ToMe] merged {tiny.blocks}/{tiny.blocks} blocks (")
    assert overridden(model) == []


def flat_keys(_, k):
    """The keys as ``[batch, tokens, channels]``."""
    return k.transpose(1, 2).flatten(2) if k.ndim == 4 else k.clone()


@every_kind
def test_the_picture_merges_and_everything_else_stays(models, log_messages, kind):
    tiny, model = TINY[kind], models(kind)
    plain_keys, plain = calls_of(model, tiny, note=flat_keys, steps=1)
    keys, merged = calls_of(model, tiny, keys_only(), flat_keys, steps=1)
    before, after = next(
        pair for pair in zip(plain_keys, keys, strict=True) if len(pair[0][0]) != len(pair[1][0])
    )
    picture = 80 * (tiny.frames or 1)
    behind = before.shape[1] - picture - tiny.before
    assert behind >= 0
    slots = after.shape[1] - tiny.before - behind
    assert picture // 2 <= slots <= picture // 2 + 8
    assert torch.equal(after[:, : tiny.before], before[:, : tiny.before])
    assert torch.equal(after[:, tiny.before + slots :], before[:, tiny.before + picture :])
    assert f"({before.shape[1]} -> {after.shape[1]} tokens" in log_messages()[-1]
    assert 1e-6 < relative_error(merged, plain) < 0.5


@every_kind
def test_a_run_can_be_repeated_and_leaves_nothing(models, kind):
    tiny, model = TINY[kind], models(kind)
    plain = sample(model, tiny)
    patched = attach(model, keys_only())
    merged = sample(patched, tiny)
    assert not torch.equal(merged, plain)
    assert torch.equal(sample(patched, tiny), merged)
    assert torch.equal(sample(attach(model, keys_only(ratio=0.0)), tiny), plain)
    assert torch.equal(sample(detach(patched), tiny), plain)
    assert torch.equal(sample(model, tiny), plain)
    assert overridden(model) == []


@every_kind
def test_an_override_that_ignores_its_function_gives_the_same_picture(models, log_messages, kind):
    tiny, model = TINY[kind], models(kind)
    lengths = []

    def theirs(_, q, k, v, *args, **kwargs):
        lengths.append(k.shape[2] if kwargs.get("skip_reshape") else k.shape[1])
        return attention_pytorch(q, k, v, *args, **kwargs)

    other = with_override(model, theirs)
    sample(other, tiny, steps=1)
    all_keys, lengths[:] = [*lengths], []
    merged = sample(attach(other, keys_only()), tiny, steps=1)
    assert sum(lengths) < sum(all_keys)
    expected = sample(attach(model, keys_only()), tiny, steps=1)
    assert relative_error(merged, expected) < 1e-5
    assert "weigh as one token" not in log_messages()[0]


@pytest.mark.parametrize("kind", ["flux", "z_image", "sd3", "omnigen2", "hidream", "wan21"])
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_batches_of_one_prompt_and_of_two(models, kind, cfg):
    tiny = TINY[kind]
    assert shuffle_error(models(kind), tiny, size=tiny.size(7, 9), batch=3, cfg=cfg) < 1e-5


@pytest.mark.parametrize(
    "kind",
    [
        *("flux", "chroma", "sd3", "qwen_image", "lumina2", "z_image", "krea2"),
        *("aura_flow", "omnigen2", "boogu", "joy_image", "wan21", "cosmos_predict2"),
    ],
)
def test_sides_that_are_not_a_whole_number_of_patches(models, log_messages, kind):
    tiny, model = TINY[kind], models(kind)
    assert shuffle_error(model, tiny, size=(15, 17)) < 1e-5
    assert log_messages()[-1].startswith(f"[ToMe] merged {tiny.blocks}/{tiny.blocks} blocks (")
    calls, _ = calls_of(model, tiny, keys_only(ratio=0.75), size=(15, 17), steps=1)
    picture = 72 * (tiny.frames or 1)
    assert min(keys for _, keys in calls if keys > 16) < tiny.before + picture


def from_the_second_frame(frames, *sides):
    """The mask of a video whose first frame is given."""
    mask = torch.ones(1, 1, frames, *sides)
    mask[:, :, 0] = 0.0
    return mask


def reference(*shape):
    return {"reference_latents": [noise(1, *shape)]}


FRAME = noise(1, 16, 1, 16, 20)
POSES = {"pose_video_latent": noise(1, 16, 3, 8, 10)}
KEYFRAME = {"keyframe_idxs": torch.ones(1, 3, 80, 2)}
WHOLE = torch.ones(1, 1, 5, 8, 10)
# Half of the last frame is left out.
PARTLY = torch.cat([torch.ones(36, 10), -torch.ones(4, 10)]).view(1, 1, 5, 8, 10)
GUIDED = {"guide_attention_entries": [{"pre_filter_count": 80, "strength": 0.5}]}
LATENT = noise(1, 24, 1, 12, 16)
REFERENCE = {"kind": "image", "latent_h": 12, "latent_w": 16, "latent": LATENT}


@pytest.mark.parametrize(
    ("kind", "extras", "merged"),
    [
        ("flux", reference(16, 12, 16), [80, 48]),
        ("flux2", reference(16, 6, 8), [80, 48]),
        ("qwen_image", reference(16, 1, 12, 16), [80, 48]),
        ("omnigen2", reference(16, 12, 16), [80, 48]),
        ("boogu", reference(16, 12, 16), [80, 48]),
        ("mage_flow", reference(128, 6, 8), [80, 48]),
        ("joy_image", reference(16, 1, 12, 16), [80, 48]),
        (
            "krea2",
            {**reference(16, 1, 12, 16), "reference_latents_method": "index_timestep_zero"},
            [80, 48],
        ),
        # The pictures: the reference, the first latent frame, the others.
        ("wan21_fun", {"reference_latents": [FRAME]}, [80, 80, 160]),
        ("wan21", {"time_dim_concat": noise(1, 16, 2, 16, 20)}, [80, 320, 80, 80]),
        ("wan21", {"context_latents": [noise(1, 16, 1, 12, 16)]}, [80, 320, 48]),
        ("wan22_s2v", {"reference_latents": [FRAME]}, [80, 160, 80]),
        ("wan21_humo", {"reference_latents": [FRAME]}, [80, 160, 80]),
        ("wan21_scail", {"reference_latents": [FRAME]} | POSES, [80, 80, 160, 20, 40]),
        ("wan21_scail", {"reference_latents": [FRAME] * 2} | POSES, [80, 80, 80, 160, 20, 40]),
        ("hunyuan_video", {"ref_latent": FRAME}, [80, 80, 240]),
        ("ltxv", KEYFRAME | {"concat_mask": WHOLE}, [80, 240]),
        ("ltxv", KEYFRAME | {"concat_mask": PARTLY}, [80, 240]),
        ("ltxv", KEYFRAME | {"concat_mask": WHOLE} | GUIDED, [80, 240]),
        ("ltxav", KEYFRAME | {"noise_mask": with_sound(torch.ones(1, 1, 4, 8, 10))}, [80, 160]),
        ("minimax_h3", {"minimax_refs": [REFERENCE]}, [80, 160]),
        ("hidream_o1", {"reference_latents": [noise(1, 96, 128, 3)]}, [80]),
        ("wan22_5b", {"noise_mask": from_the_second_frame(2, 16, 20)}, [80, 80]),
        ("ltxv", {"noise_mask": from_the_second_frame(5, 8, 10)}, [80, 320]),
        ("ltxav", {"noise_mask": with_sound(from_the_second_frame(4, 8, 10))}, [80, 240]),
        ("cosmos_predict2", {"noise_mask": from_the_second_frame(3, 16, 20)}, [80, 160]),
    ],
)
def test_references_and_given_frames(models, kind, extras, merged):
    """Each picture merges within itself; what is not known to be one stays."""
    tiny, model = TINY[kind], models(kind)
    # HunyuanVideo cannot sample two prompts with a reference at once.
    options = {"steps": 1, "cfg": 1.0 if kind == "hunyuan_video" else 4.0}
    without = sample(model, tiny, **options)
    given = dict(extras)
    # The sampler takes the mask of what is given beside the prompts.
    options |= {"noise_mask": given.pop("noise_mask", None), "extras": given}
    before, plain = calls_of(model, tiny, **options)
    all_of_them = f"{tiny.name} with all of {', '.join(extras)}"
    needs(all_of_them, relative_error(plain, without) > 1e-6)
    after, _ = calls_of(model, tiny, keys_only(), **options)
    keys, fewer = merged_keys(before, after)[0]
    needs(all_of_them, keys >= tiny.before + sum(merged))
    assert fewer == sum(merged) // 2
    assert shuffle_error(model, tiny, **options) < 1e-5


@pytest.mark.parametrize("kind", ["qwen_image", "hunyuan_video", "ideogram4", "lens"])
@pytest.mark.parametrize("attn_tokens", ["k,v", "q,k,v"])
def test_masked_text_stays_masked(models, kind, attn_tokens):
    tiny, model = TINY[kind], models(kind)
    config = keys_only(attn_tokens=attn_tokens)
    mask = torch.ones(1, TEXT, dtype=torch.int64)
    mask[:, TEXT // 2 :] = 0
    masked = conditioning(tiny, 5, attention_mask=mask)
    # Not all of these models take masks for two samples.
    options = {"prompts": (masked, masked), "cfg": 1.0}
    expected = sample(model, tiny, **options)
    assert relative_error(sample(model, tiny, cfg=1.0), expected) > 1e-4
    assert shuffle_error(model, tiny, config, **options) < 1e-5
    merged = sample(attach(model, config), tiny, **options)
    assert relative_error(merged, expected) < 0.5


@pytest.mark.parametrize("strategy", ["bipartite", "window", "cluster"])
def test_keys_and_values_that_count_once_are_means(models, monkeypatch, strategy):
    """As in the paper."""
    tiny, model = TINY["wan21"], models("wan21")
    calls, plans, plan_of = [], [], AttentionBlock.plan_of

    def theirs(_, q, k, v, *args, **kwargs):
        calls.append((k, v))
        return attention_pytorch(q, k, v, *args, **kwargs)

    def noted(*args):
        plans.append(plan_of(*args))
        return plans[-1]

    other = with_override(model, theirs)
    sample(other, tiny, steps=1, cfg=1.0)
    before = calls[0]
    calls.clear()
    monkeypatch.setattr(AttentionBlock, "plan_of", noted)
    patched = attach(other, keys_only(strategy=strategy, proportional_attn=False))
    sample(patched, tiny, steps=1, cfg=1.0)
    for each, merged in zip(before, calls[0], strict=True):
        assert relative_error(merged, plans[0].merge(each)) < 1e-6


@pytest.mark.parametrize("kind", ["flux", "z_image", "qwen_image", "wan21", "omnigen2"])
def test_torch_compile_makes_whole_graphs(models, fresh_compiler, kind):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    tiny, model = TINY[kind], models(kind)

    def results(model):
        """Of the model, with two settings, and without again."""
        patched = [attach(model, keys_only(ratio=ratio)) for ratio in (0.5, 0.25)]
        return [sample(each, tiny) for each in (model, *patched, model)]

    expected = results(model)
    compiled = model.clone()
    # On a GPU the host's own attention with a mask and grouped queries breaks the graph.
    is_whole = kind != "omnigen2" or model.load_device.type == "cpu"
    set_torch_compile_wrapper(compiled, backend="eager", fullgraph=is_whole)
    for given, wanted in zip(results(compiled), expected, strict=True):
        assert relative_error(given, wanted) < 1e-5


@pytest.mark.parametrize(
    "kind",
    [
        *("flux", "wan21", "krea2", "sd3", "ltxv", "ltxav", "cosmos_predict2", "minimax_h3"),
        *("aura_flow", "omnigen2", "hunyuan_video"),
    ],
)
def test_merged_keys_weigh_as_much_as_all_keys(models, kind):
    if kind in ("ltxv", "ltxav"):
        # One that passes masks by place does not show them to an override.
        has_matrix = hasattr(comfy.ldm.lightricks.model, "freqs_cis_matrix")
        needs("LTX that passes masks by name", has_matrix)
    tiny, model = TINY[kind], models(kind)
    calls = []

    def theirs(_, q, k, v, heads, mask=None, **kwargs):
        calls.append((k.shape[-2], mask))
        return attention_pytorch(q, k, v, heads, mask=mask, **kwargs)

    other = with_override(model, theirs)
    sample(other, tiny, steps=3)
    plain, calls[:] = [keys for keys, _ in calls], []
    sample(attach(other, keys_only()), tiny, steps=3)
    fewer = [
        (before, mask) for before, (keys, mask) in zip(plain, calls, strict=True) if keys < before
    ]
    assert len(fewer) >= tiny.blocks * 3
    for before, mask in fewer:
        assert torch.allclose(mask.exp().sum(-1), torch.tensor(float(before), device=mask.device))


@pytest.mark.parametrize("kind", ["flux", "hidream"])
def test_scope_stack_falls_back_to_attention(models, log_messages, kind):
    tiny, model = TINY[kind], models(kind)
    merged, expected = (
        sample(attach(model, merging(strategy="window", scope=scope)), tiny, tiny.size(16, 16))
        for scope in ("stack", "module")
    )
    assert torch.equal(merged, expected)
    words = f"module scope in {tiny.blocks} as this kind of model does not merge stacks of blocks"
    assert words in log_messages()[0]


def test_what_a_transformer_cannot_merge_is_reported(models, log_messages):
    tiny, model = TINY["flux"], models("flux")
    config = merging(merge_attn=False, merge_mlp=True)
    assert torch.equal(sample(attach(model, config), tiny), sample(model, tiny))
    assert log_messages()[-1] == (
        "[ToMe] nothing merged: merge_attn is off, and nothing else merges in models of this kind"
    )


@pytest.mark.parametrize(
    ("replacement", "blocks"),
    [(lambda args, _: args, 3), (lambda args, extra: extra["original_block"](args), 4)],
    ids=["in its place", "around it"],
)
def test_a_block_that_another_node_replaces_is_left_to_it(
    models, log_messages, replacement, blocks
):
    tiny, other = TINY["flux"], models("flux").clone()
    other.set_model_patch_replace(replacement, "dit", "double_block", 1)
    assert shuffle_error(other, tiny) < 1e-5
    assert log_messages()[-1].startswith(f"[ToMe] merged {blocks}/4 blocks")


def test_tokens_that_another_node_adds_stay(models, log_messages):
    tiny, other = TINY["flux"], models("flux").clone()

    def more_text(args):
        return args | {name: torch.cat([args[name]] * 2, 1) for name in ("txt", "txt_ids")}

    other.set_model_patch(more_text, "post_input")
    assert shuffle_error(other, tiny) < 1e-5
    assert f"merged 4/4 blocks ({2 * TEXT + 80} -> " in log_messages()[-1]


def test_a_subclass_of_a_known_class_is_asked(log_messages):
    class Unheard(comfy.ldm.flux.model.Flux):
        pass

    tiny = TINY["flux"]
    model = build(tiny)
    model.model.diffusion_model.__class__ = Unheard
    assert shuffle_error(model, tiny) < 1e-5
    assert "merged 4/4 blocks" in log_messages()[-1]
    assert "unknown model, picture found by asking" in log_messages()[-1]


LATER = {
    "minimax_music.dit.MiniMaxMusic3DiT",
    "qwen_image21.model.QwenImage21Transformer2DModel",
    "sensenova.model.SenseNovaU15",
    "trellis2.model.Trellis2",
    "wan.model_animate2.WanAnimate2Model",
}
"""Classes of later hosts, below ``comfy.ldm``."""

ASKED = {
    "aura.mmdit.MMDiT",
    "boogu.model.BooguTransformer2DModel",
    "cogvideo.model.CogVideoXTransformer3DModel",
    "cosmos.model.GeneralDIT",
    "genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
    "ideogram4.model.Ideogram4Transformer2DModel",
    "joyimage.model.JoyImageTransformer3DModel",
    "kandinsky5.model.Kandinsky5",
    "lens.model.LensTransformer2DModel",
    "mage_flow.model.MageFlowTransformer2DModel",
    "omnigen.omnigen2.OmniGen2Transformer2DModel",
    "pixeldit.model.PixDiT_T2I",
    "pixeldit.pid.PidNet",
}
"""Classes whose pictures are found by asking, below ``comfy.ldm``."""


@pytest.mark.newest_only
def test_records_and_refusals_name_classes_of_the_host():
    classes = [name for each in TRANSFORMERS for name in each.model_classes]
    assert len(set(classes)) == len(classes)
    for name in [*classes, *REFUSED]:
        if name.removeprefix("comfy.ldm.") in LATER:
            continue
        module, _, found = name.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), found), type)


def test_every_class_that_the_host_loads_is_known():
    """Every class of a model is in a record, refused, or among those that are asked."""
    source = inspect.getsource(comfy.model_base)
    made_of = set(re.findall(r"unet_model=(comfy\.ldm\.[\w.]+)", source))
    known = {name for each in TRANSFORMERS for name in each.model_classes} | set(REFUSED)
    known |= {f"comfy.ldm.{name}" for name in ASKED}
    analysers = ("rt_detr", "depth_anything", "sam3")
    models = {name for name in made_of if not any(part in name for part in analysers)}
    assert models - known == set(), "see CONTRIBUTING, a family of models"


def test_an_unreachable_attention_is_refused_with_its_reason():
    model = torch.nn.Module()
    model.__class__ = type(
        "PixArtMS", (torch.nn.Module,), {"__module__": "comfy.ldm.pixart.pixartms"}
    )
    with pytest.raises(ValueError, match="a PixArtMS: its attention cannot be reached"):
        record_of(model)


@pytest.mark.parametrize("frame", [-1, 1, 4])
def test_a_report_shows_any_frame_of_a_video(models, frame):
    tiny, model = TINY["wan21"], models("wan21")
    patched = attach(model, keys_only(), wants_details=lambda: True)
    sample(patched, tiny)
    run = last_run(patched)
    slots = run.recording.slots[1, Grid(8, 10, 5)]
    assert slots.shape == (5, 8, 10)
    # The first latent frame merges separately; in the others, cells span several frames.
    assert not np.isin(slots[0], slots[1:]).any()
    assert np.isin(slots[1], slots[2:]).any()
    shown = 2 if frame == -1 else frame - 1
    expected = drawing.merge_map(slots[shown], None, drawing.merged_tokens(slots)[shown])
    height, width = expected.shape[:2]
    drawn = report_of(run, frame=frame).picture
    assert np.array_equal(drawn[-20 - height : -20, 20 : 20 + width], expected)
    places = []
    grey = np.full((16, 20, 3), 0.5)
    report_of(run, picture_at=lambda place: places.append(place) or grey, frame=frame)
    assert places == [shown / 4]


def test_a_missing_frame_is_reported(models):
    tiny, model = TINY["wan21"], models("wan21")
    patched = attach(model, keys_only(), wants_details=lambda: True)
    sample(patched, tiny, steps=1)
    card = drawing.card("There is no frame 6", ["Hint: set frame to 1 to 5, or to -1."])
    assert np.array_equal(report_of(last_run(patched), frame=6).picture, card)
