"""Merging in transformers: tiny models of ComfyUI's own classes, also two in one run."""

import importlib

import comfy.ldm.flux.model
import comfy.ldm.lightricks.model
import comfy.samplers
import numpy as np
import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy_extras import nodes_custom_sampler as nodes
from common import Shuffle, relative_error
from host import (
    calls_of,
    compiled,
    keys_only,
    merged_keys,
    merging,
    needs,
    shuffle_error,
    with_override,
)
from models.comfyui import AURA_FLOW, TEXT, TINY, build, conditioning, sample

from tome_nodes import reasons
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.comfyui.models import transformers
from tome_nodes.comfyui.models.attention_block import AttentionBlock
from tome_nodes.report import drawing
from tome_nodes.report.pages import report_of
from tome_nodes.strategies.plan import Grid

every_kind = pytest.mark.parametrize("kind", TINY)


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def tokens_of(q, k):
    """The queries and keys of a call as ``[batch, tokens, channels]``."""
    return [x.transpose(1, 2).flatten(2) if x.ndim == 4 else x.clone() for x in (q, k)]


@every_kind
def test_keys_of_the_picture_merge_and_everything_else_stays(models, log_messages, kind):
    tiny, model = TINY[kind], models(kind)
    plain_calls, plain = calls_of(model, tiny, note=tokens_of, steps=1)
    calls, merged = calls_of(model, tiny, merging(strategy="window"), tokens_of, steps=1)
    assert [q.shape for q, _ in calls] == [q.shape for q, _ in plain_calls]
    before, after = next(
        (plain_k, k)
        for (_, plain_k), (_, k) in zip(plain_calls, calls, strict=True)
        if k.shape != plain_k.shape
    )
    picture = 80 * (tiny.frames or 1)
    behind = before.shape[1] - picture - tiny.before
    assert behind >= 0
    slots = after.shape[1] - tiny.before - behind
    assert picture // 2 <= slots <= picture // 2 + 8
    assert torch.equal(after[:, : tiny.before], before[:, : tiny.before])
    assert torch.equal(after[:, tiny.before + slots :], before[:, tiny.before + picture :])
    line = log_messages()[-1]
    assert f"({picture} -> {slots} tokens" in line
    assert "ratio 0.50 of keys and values in self-attention" in line
    assert 1e-6 < relative_error(merged, plain) < 0.5


def test_settings_that_are_for_unets_act_as_keys_and_values_alone(models, log_messages):
    tiny, model = TINY["flux"], models("flux")
    expected, *others = (
        sample(attach(model, keys_only(**settings)), tiny)
        for settings in ({}, {"attn_tokens": "q,k,v"}, {"scope": "stack"})
    )
    assert all(torch.equal(result, expected) for result in others)
    assert len({*log_messages()}) == 1
    config = merging(merge_attn=False, merge_mlp=True)
    assert torch.equal(sample(attach(model, config), tiny), sample(model, tiny))
    assert log_messages()[-1] == f"[ToMe] nothing merged: {reasons.ATTENTION_OFF}"


def attending(model):
    """The model with an attention in place of the host's, and its keys, values and masks."""
    calls = []

    def theirs(_, q, k, v, heads, mask=None, **kwargs):
        calls.append((k, v, mask))
        return attention_pytorch(q, k, v, heads, mask=mask, **kwargs)

    return with_override(model, theirs), calls


@pytest.mark.parametrize("kind", ["flux", "qwen_image", "z_image", "wan21", "hidream"])
def test_sides_that_are_not_a_whole_number_of_patches_in_batches(models, log_messages, kind):
    tiny, model = TINY[kind], models(kind)
    for cfg in 1.0, 4.0:
        assert shuffle_error(model, tiny, size=(15, 17), batch=3, cfg=cfg) < 1e-5
    assert f"{tiny.blocks}/{tiny.blocks} blocks ({72 * (tiny.frames or 1)} ->" in log_messages()[-1]


def reference(*shape):
    return {"reference_latents": [noise(1, *shape)]}


FRAME = noise(1, 16, 1, 16, 20)


@pytest.mark.parametrize(
    ("kind", "extras", "reason"),
    [
        ("flux", reference(16, 12, 16), reasons.REFERENCES),
        ("qwen_image", reference(16, 1, 12, 16), reasons.REFERENCES),
        ("hunyuan_video", {"ref_latent": FRAME}, reasons.REFERENCES),
        ("wan21_fun", {"reference_latents": [FRAME]}, reasons.PICTURE_NOT_FOUND),
        ("wan21", {"time_dim_concat": noise(1, 16, 2, 16, 20)}, reasons.PICTURE_NOT_FOUND),
        ("wan21", {"context_latents": [noise(1, 16, 1, 12, 16)]}, reasons.PICTURE_NOT_FOUND),
    ],
)
def test_beside_tokens_of_other_pictures_nothing_merges(models, log_messages, kind, extras, reason):
    tiny, model = TINY[kind], models(kind)
    # HunyuanVideo cannot sample two prompts with a reference at once.
    options = {"steps": 1, "cfg": 1.0 if kind == "hunyuan_video" else 4.0}
    without = sample(model, tiny, **options)
    plain = sample(model, tiny, extras=extras, **options)
    needs(f"{tiny.name} with {', '.join(extras)}", relative_error(plain, without) > 1e-6)
    assert torch.equal(sample(attach(model, keys_only()), tiny, extras=extras, **options), plain)
    assert log_messages() == [f"[ToMe] nothing merged: {reason}"]


LATENT = noise(1, 24, 1, 12, 16)
REFERENCE = {"kind": "image", "latent_h": 12, "latent_w": 16, "latent": LATENT}


@pytest.mark.parametrize(
    ("kind", "extras"),
    [
        ("wan22_s2v", {"reference_latents": [FRAME]}),
        ("wan21_humo", {"reference_latents": [FRAME]}),
        ("minimax_h3", {"minimax_refs": [REFERENCE]}),
    ],
)
def test_references_on_the_other_side_of_a_video_stay(models, kind, extras):
    tiny, model = TINY[kind], models(kind)
    options = {"steps": 1, "extras": extras}
    before, _ = calls_of(model, tiny, **options)
    after, _ = calls_of(model, tiny, keys_only(), **options)
    keys, fewer = merged_keys(before, after)[0]
    assert keys > tiny.before + 240
    assert fewer == 240 // 2
    assert shuffle_error(model, tiny, **options) < 1e-5


@pytest.mark.parametrize("kind", ["qwen_image", "hunyuan_video"])
def test_masked_text_stays_masked(models, kind):
    tiny, model = TINY[kind], models(kind)
    mask = torch.ones(1, TEXT, dtype=torch.int64)
    mask[:, TEXT // 2 :] = 0
    masked = conditioning(tiny, 5, attention_mask=mask)
    # Not all of these models take masks for two samples.
    options = {"prompts": (masked, masked), "cfg": 1.0}
    expected = sample(model, tiny, **options)
    assert relative_error(sample(model, tiny, cfg=1.0), expected) > 1e-4
    assert shuffle_error(model, tiny, **options) < 1e-5
    merged = sample(attach(model, keys_only()), tiny, **options)
    assert relative_error(merged, expected) < 0.5


@pytest.mark.parametrize("strategy", ["bipartite", "window", "cluster"])
def test_keys_and_values_that_count_once_are_means(models, monkeypatch, strategy):
    tiny, plans, plan_of = TINY["wan21"], [], AttentionBlock.plan_of

    def noted(*args):
        plans.append(plan_of(*args))
        return plans[-1]

    other, calls = attending(models("wan21"))
    sample(other, tiny, steps=1, cfg=1.0)
    before, calls[:] = calls[0], []
    monkeypatch.setattr(AttentionBlock, "plan_of", noted)
    patched = attach(other, keys_only(strategy=strategy, proportional_attn=False))
    sample(patched, tiny, steps=1, cfg=1.0)
    for tokens, merged in zip(before[:2], calls[0][:2], strict=True):
        assert relative_error(merged, plans[0].merge(tokens)) < 1e-6


@pytest.mark.parametrize("kind", ["flux", "krea2", "sd3", "wan21", "ltxv", "minimax_h3"])
def test_an_override_in_place_of_the_attention_gets_keys_that_weigh_as_much_as_all(
    models, log_messages, kind
):
    if kind == "ltxv":
        # One that passes masks by place does not show them to an override.
        has_matrix = hasattr(comfy.ldm.lightricks.model, "freqs_cis_matrix")
        needs("LTX that passes masks by name", has_matrix)
    tiny = TINY[kind]
    other, calls = attending(models(kind))
    sample(other, tiny, steps=3)
    plain, calls[:] = [k.shape[-2] for k, _, _ in calls], []
    merged = sample(attach(other, keys_only()), tiny, steps=3)
    pairs = zip(plain, calls, strict=True)
    fewer = [(before, mask) for before, (k, _, mask) in pairs if k.shape[-2] < before]
    assert len(fewer) >= tiny.blocks * 3
    for before, mask in fewer:
        assert torch.allclose(mask.exp().sum(-1), torch.tensor(float(before), device=mask.device))
    expected = sample(attach(models(kind), keys_only()), tiny, steps=3)
    assert relative_error(merged, expected) < 1e-5
    assert "weigh as one token" not in log_messages()[0]


@pytest.mark.parametrize("kind", ["krea2", "wan21"])
def test_torch_compile_makes_whole_graphs(models, fresh_compiler, kind):
    tiny, model = TINY[kind], models(kind)
    # That two settings do not get in each other's way is the same for all.
    ratios = (0.5, 0.25) if kind == "wan21" else (0.5,)

    def results(model):
        patched = [attach(model, keys_only(ratio=ratio)) for ratio in ratios]
        return [sample(run, tiny) for run in (model, *patched, model)]

    expected = results(model)
    # On a GPU the host's own attention with a mask and grouped queries breaks the graph.
    is_whole = kind != "krea2" or model.load_device.type == "cpu"
    graphs = compiled(model.clone(), backend="eager", fullgraph=is_whole)
    for given, wanted in zip(results(graphs), expected, strict=True):
        assert relative_error(given, wanted) < 1e-5


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


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("txt", "txt_ids"), "merged 4/4 blocks (80 -> "),
        # Flux says in its last two blocks where the picture is, and that is not all.
        (("img", "img_ids"), "merged 2/4 blocks"),
    ],
)
def test_tokens_that_another_node_adds_stay(models, log_messages, names, line):
    tiny, other = TINY["flux"], models("flux").clone()

    def more_tokens(args):
        return args | {name: torch.cat([args[name]] * 2, 1) for name in names}

    other.set_model_patch(more_tokens, "post_input")
    assert shuffle_error(other, tiny) < 1e-5
    assert line in log_messages()[-1]


class Unheard(comfy.ldm.flux.model.Flux):
    """Derived from a class with a record."""


@pytest.mark.parametrize(("tiny", "name"), [(AURA_FLOW, "MMDiT"), (TINY["flux"], "Unheard")])
def test_a_model_without_a_record_is_refused_by_name(tiny, name):
    model = build(tiny)
    if name == "Unheard":
        model.model.diffusion_model.__class__ = Unheard
    with pytest.raises(ValueError, match=f"tokens do not merge in a {name}, but its steps can be"):
        attach(model, keys_only())


@pytest.mark.parametrize("forecast", [False, True])
def test_a_model_that_keeps_state_is_refused_under_every_preset(forecast):
    model = build(TINY["wan21"])
    network = model.model.diffusion_model
    network.__class__ = type(
        "CausalWanModel", (type(network),), {"__module__": "comfy.ldm.wan.ar_model"}
    )
    why = "no step of a CausalWanModel can be forecast: it keeps keys of earlier frames"
    with pytest.raises(ValueError, match=why):
        attach(model, keys_only(forecast=forecast))


@pytest.mark.newest_only
def test_records_name_classes_of_the_host():
    classes = [name for record in transformers.TRANSFORMERS for name in record.classes]
    assert len(set(classes)) == len(classes)
    for name in classes:
        module, _, kind = f"comfy.ldm.{name}".rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), kind), type)


@pytest.mark.parametrize("frame", [-1, 1, 4])
def test_a_report_shows_any_frame_of_a_video(models, frame):
    tiny, model = TINY["wan21"], models("wan21")
    patched = attach(model, keys_only(), wants_details=lambda: True)
    sample(patched, tiny)
    run = last_run(patched)
    slots = run.recording.slots[1, Grid(8, 10, 5)]
    assert slots.shape == (5, 8, 10)
    # Cells span several frames.
    assert np.isin(slots[0], slots[1:]).any()
    shown = 2 if frame == -1 else frame - 1
    pictures = np.random.default_rng(0).random((9, 16, 20, 3))
    for given, picture in (None, None), (pictures, pictures[2 * shown]):
        expected = drawing.merge_map(slots, picture, shown)
        height, width = expected.shape[:2]
        drawn = report_of(run, frame=frame, pictures=given).picture
        assert np.array_equal(drawn[-20 - height : -20, 20 : 20 + width], expected)


def test_a_missing_frame_is_reported(models):
    tiny, model = TINY["wan21"], models("wan21")
    patched = attach(model, keys_only(), wants_details=lambda: True)
    sample(patched, tiny, steps=1)
    hint = "Hint: set frame to 1 to 5, or to -1."
    page = drawing.page("There is no merge map of frame 6", [hint])
    assert np.array_equal(report_of(last_run(patched), frame=6).picture, page)


def sampled(positive, negative, kinds=("flux", "z_image"), steps=2):
    needs("Dual Model CFG Guider", hasattr(nodes, "Guider_DualModel"))
    tinies = [TINY[kind] for kind in kinds]
    guider = nodes.Guider_DualModel(positive, negative)
    guider.set_conds(*(conditioning(tiny, seed) for tiny, seed in zip(tinies, (5, 6), strict=True)))
    guider.set_cfg(4.0)
    latent = torch.zeros(1, tinies[0].channels, *tinies[0].size(8, 10))
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    sigmas = torch.linspace(1, 0, steps + 1)
    return guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas)


@pytest.mark.parametrize("kinds", [("flux", "z_image"), ("z_image", "flux"), ("flux", "sd3")])
def test_each_merges_as_a_model_of_its_own_kind(models, log_messages, kinds):
    positive, negative = map(models, kinds)
    expected = sampled(positive, negative, kinds)
    shuffled = sampled(attach(positive, keys_only(), Shuffle), negative, kinds)
    assert relative_error(shuffled, expected) < 1e-5
    lines = [f"[ToMe] merged {TINY[kind].blocks}/{TINY[kind].blocks} blocks (" for kind in kinds]
    assert [line[: len(start)] for line, start in zip(log_messages(), lines, strict=True)] == lines


def test_one_that_cannot_merge_runs_unmerged_and_says_so(models, log_messages):
    positive, negative = models("flux"), build(TINY["z_image"])
    network = negative.model.diffusion_model
    network.__class__ = type("Unheard", (type(network),), {})
    expected = sampled(positive, negative)
    shuffled = sampled(attach(positive, keys_only(), Shuffle), negative)
    assert relative_error(shuffled, expected) < 1e-5
    warning, line = log_messages()
    assert warning.startswith(
        "[ToMe] a second model of this run stays unmerged: tokens do not merge in a Unheard, "
    )
    assert line.startswith("[ToMe] merged ")


def test_a_patch_on_the_negative_model_alone_is_not_silent(models, log_messages):
    positive, negative = models("flux"), models("z_image")
    expected = sampled(positive, negative)
    assert torch.equal(sampled(positive, attach(negative, merging())), expected)
    (warning,) = log_messages()
    assert warning.startswith("[ToMe] the settings of ToMe Patch Model on Lumina2 are not used")
    assert "negative" in warning
