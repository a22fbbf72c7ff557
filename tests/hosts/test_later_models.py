"""Models of later hosts, by twins with the same contract (see `CONTRIBUTING.md`).

Where the host has the real class, that is tested as well.
"""

import copy

import comfy.supported_models
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from common import Counted, relative_error
from host import (
    OVERRIDE,
    calls_of,
    keys_only,
    merged_keys,
    needs,
    overridden,
    shuffle_error,
    with_override,
)
from models import made_up
from models.comfyui import TEXT, TINY, WAN_ANIMATE_2, Tiny, build, conditioning, sample
from models.twins import QwenImage21, SenseNova, StoredAttention, WanAnimate2, named

from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.models import TRANSFORMERS

PICTURE = 80


@named("qwen_image21.model.QwenImage21Transformer2DModel")
class Cached(QwenImage21):
    """Runs what is before the picture once."""

    caches = True


TWINS = {
    QwenImage21: Tiny("", blocks=3, patch=1),
    Cached: Tiny("", blocks=3, patch=1),
    SenseNova: Tiny("", blocks=3, channels=3, patch=32),
    WanAnimate2: Tiny("", frames=4),
}


def twin(kind):
    """A twin that keeps nothing from one run to the next, and what samplers need to know of it."""
    model = made_up.build(kind)

    def afresh(executor, *args, **kwargs):
        model.model.diffusion_model.kept = []
        return executor(*args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "afresh", afresh)
    return model, TWINS[kind]


@pytest.mark.parametrize("kind", TWINS)
def test_twins_merge_the_keys_of_the_picture_and_nothing_else(kind, log_messages):
    model, tiny = twin(kind)
    before, plain = calls_of(model, tiny, cfg=1.0)
    after, merged = calls_of(model, tiny, keys_only(), cfg=1.0)
    picture = PICTURE * (tiny.frames or 1)
    fewer = merged_keys(before, after)
    assert len(fewer) == 2 * tiny.blocks * (tiny.frames or 1)
    assert all(picture // 2 - 8 <= number <= picture // 2 for _, number in fewer)
    assert [queries for queries, _ in after] == [queries for queries, _ in before]
    assert 1e-6 < relative_error(merged, plain) < 0.5
    assert f"merged {tiny.blocks}/{tiny.blocks} blocks" in log_messages()[-1]
    assert "by asking" not in log_messages()[-1]
    assert shuffle_error(model, tiny, size=tiny.size(7, 9), cfg=1.0) < 1e-5
    assert overridden(model) == []


def test_references_of_qwen_image_21_stay_in_the_prefix():
    model, tiny = twin(QwenImage21)
    reference = torch.randn(1, 16, 12, 16, generator=torch.Generator().manual_seed(3))
    options = {"steps": 1, "cfg": 1.0, "extras": {"reference_latents": [reference]}}
    before, _ = calls_of(model, tiny, **options)
    after, _ = calls_of(model, tiny, keys_only(), **options)
    assert before[:3] == [(TEXT, TEXT), (192, TEXT + 192), (80, TEXT + 272)]
    assert after[:3] == [(TEXT, TEXT), (192, TEXT + 192), (80, TEXT + 232)]
    assert shuffle_error(model, tiny, **options) < 1e-5


def test_the_frames_of_wan_animate_2_share_one_plan_in_each_block():
    model, tiny = twin(WanAnimate2)
    attached = attach(model, keys_only(), Counted)
    sample(attached, tiny, steps=1, cfg=1.0)
    # What is tried and asked once has happened.
    before = Counted.made
    sample(attached, tiny, steps=1, cfg=1.0)
    # The reference attends without a pose. Of a video, the first frame and the others merge apart.
    assert Counted.made - before == tiny.blocks * 2 * 2


def test_attention_to_a_long_prompt_never_merges():
    """The prompt has more tokens than the picture, and its attention the same queries."""
    model, tiny = twin(WanAnimate2)
    prompts = conditioning(tiny, 5, tokens=30), conditioning(tiny, 6, tokens=30)
    options = {"size": tiny.size(2, 3), "cfg": 1.0, "prompts": prompts}
    before, _ = calls_of(model, tiny, **options)
    after, _ = calls_of(model, tiny, keys_only(), **options)
    assert (24, 30) in before
    assert after.count((24, 30)) == before.count((24, 30))
    assert after != before


def test_the_real_wan_animate_2_merges_the_keys_of_its_frames(log_messages):
    tiny, video = WAN_ANIMATE_2, 4 * PICTURE
    needs(tiny.name, hasattr(comfy.supported_models, tiny.name), since="0.33.0")
    model = build(tiny)
    generator = torch.Generator().manual_seed(3)
    video_of_poses = torch.randn(1, 16, 3, *tiny.size(8, 10), generator=generator)
    posed = {"extras": {"pose_video_latent": video_of_poses}, "cfg": 1.0}
    before, plain = calls_of(model, tiny, **posed)
    after, merged = calls_of(model, tiny, keys_only(), **posed)
    # The poses, with their prompt; each frame; the frames' prompt.
    poses, prompt = [(240, 240), (240, TEXT)], [(video, TEXT)]
    assert {*before} == {*poses, *prompt, (PICTURE, video), (PICTURE, video + PICTURE)}
    halves = (PICTURE, video // 2), (PICTURE, video // 2 + PICTURE)
    assert {*after} == {*poses, *prompt, *halves}
    assert len(after) == len(before)
    assert 1e-6 < relative_error(merged, plain) < 0.5
    assert f"merged {tiny.blocks}/{tiny.blocks} blocks" in log_messages()[-1]
    assert shuffle_error(model, tiny, extras=posed["extras"]) < 1e-5
    assert shuffle_error(model, tiny, size=tiny.size(7, 9)) < 1e-5
    assert overridden(model) == []


@pytest.mark.parametrize("kind", ["minimax_h3", "krea2", "wan21"])
def test_an_attention_that_is_stored_with_the_weights_gets_the_merged_keys(
    models, kind, log_messages, monkeypatch
):
    tiny, model = TINY[kind], models(kind)
    expected = sample(attach(model, keys_only()), tiny)
    record = next(each for each in TRANSFORMERS if each.matches(model.model.diffusion_model))
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
