"""Transformers without a record: they are asked where their picture is."""

import gc
import weakref

import comfy.model_management
import pytest
import torch
from common import Shuffle, relative_error
from host import calls_of, keys_only, merged_keys, overridden, shuffle_error, with_override
from models import made_up
from models.comfyui import TEXT, TINY, Tiny, build, conditioning, sample
from models.made_up import MERGING, REFUSED, Turning
from torch.utils.flop_counter import FlopCounterMode

from tome_nodes.comfyui import asking, attachment
from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.models.unknown import unknown_transformer

FOUND = "unknown model, picture found by asking"


def made(kind):
    """A made-up model, and what the samplers of tests need to know of it."""
    frames = 3 if kind is made_up.VideoAmongReferences else None
    return made_up.build(kind), Tiny(kind.__name__, frames=frames, patch=kind.patch[1])


KNOWN = [
    *("flux", "flux2", "chroma", "sd3", "qwen_image", "lumina2", "z_image", "krea2", "hidream"),
    *("wan21", "wan21_i2v", "wan21_vace", "wan21_camera", "wan21_humo", "wan22_s2v", "wan21_scail"),
    *("hunyuan_video", "ltxv", "ltxav", "cosmos_predict2", "anima", "minimax_h3"),
]
"""Kinds that have a record; those without are asked in all other tests."""


@pytest.mark.parametrize("kind", KNOWN)
def test_asking_finds_what_the_record_says(models, log_messages, monkeypatch, kind):
    tiny, model = TINY[kind], models(kind)
    expected, picture = calls_of(model, tiny, keys_only(), steps=1)
    monkeypatch.setattr(attachment, "record_of", unknown_transformer)
    asked, same_picture = calls_of(model, tiny, keys_only(), steps=1)
    assert asked == expected
    assert torch.equal(same_picture, picture)
    assert FOUND in log_messages()[-1]
    assert shuffle_error(model, tiny) < 1e-5
    assert overridden(model) == []


@pytest.mark.parametrize("kind", MERGING)
@pytest.mark.parametrize("attn_tokens", ["k,v", "q,k,v"])
def test_made_up_models_merge_their_pictures_only(log_messages, kind, attn_tokens):
    model, tiny = made(kind)
    config = keys_only(attn_tokens=attn_tokens)
    before, plain = calls_of(model, tiny)
    after, merged = calls_of(model, tiny, config)
    picture = 80 * (tiny.frames or 1)
    fewer = merged_keys(before, after)
    assert fewer
    assert all(picture // 2 - 8 <= number <= picture // 2 for _, number in fewer)
    assert 1e-6 < relative_error(merged, plain) < 0.5
    assert FOUND in log_messages()[-1]
    assert shuffle_error(model, tiny, config) < 1e-5


@pytest.mark.parametrize("kind", REFUSED)
def test_models_whose_tokens_do_not_stand_row_by_row_do_not_merge(log_messages, kind):
    model, tiny = made(kind)
    plain = sample(model, tiny)
    assert torch.equal(sample(attach(model, keys_only()), tiny), plain)
    assert (
        f"nothing merged: the picture of a {kind.__name__} was not found by asking"
        in log_messages()[-1]
    )
    assert overridden(model) == []


def test_blocks_between_which_tokens_change_places_do_not_merge(log_messages):
    model, tiny = made(Turning)
    assert shuffle_error(model, tiny) < 1e-5
    assert "merged 1/3 blocks" in log_messages()[-1]


def test_references_of_an_unknown_model_merge_within_themselves():
    model, tiny = made(made_up.VideoAmongReferences)
    references = [
        torch.randn(1, 16, 1, *sides, generator=torch.Generator().manual_seed(3))
        for sides in ((12, 16), (16, 20))
    ]
    extras = {"reference_latents": references}
    before, _ = calls_of(model, tiny, extras=extras)
    after, _ = calls_of(model, tiny, keys_only(), extras=extras)
    assert merged_keys(before, after)[0] == (48 + 80 + 240 + 32, (48 + 80 + 240) // 2)
    assert shuffle_error(model, tiny, extras=extras) < 1e-5


def test_prompts_of_different_lengths():
    model, tiny = made(made_up.RegistersAndTextBehind)
    ((text, extras),) = conditioning(tiny, 5)
    prompts = [[[text[:, : TEXT // 2], extras]], conditioning(tiny, 6)]
    before, _ = calls_of(model, tiny, prompts=prompts)
    after, _ = calls_of(model, tiny, keys_only(), prompts=prompts)
    # Two steps for each of the prompts: the refiner, which does not merge, and three blocks.
    assert len(before) == 16
    assert [merged for _, merged in merged_keys(before, after)] == [40, 40, 40] * 4
    assert shuffle_error(model, tiny, prompts=prompts) < 1e-5


def test_asking_disturbs_nothing(monkeypatch):
    """Neither other nodes' wrappers and overrides nor random numbers, and it asks once."""
    model, tiny = made(made_up.RegistersAndTextBehind)
    seen = []

    def wrapper(executor, *args, **kwargs):
        seen.append("wrapper")
        return executor(*args, **kwargs)

    def theirs(func, *args, **kwargs):
        seen.append("override")
        return func(*args, **kwargs)

    def draws(*_):
        torch.rand(1)

    other = with_override(model, theirs)
    other.add_wrapper_with_key("diffusion_model", "other", wrapper)
    model.model.diffusion_model.to_time.register_forward_hook(draws)
    asked = []
    ask = asking._asked
    monkeypatch.setattr(asking, "_asked", lambda *args: asked.append(args) or ask(*args))
    options = {"sampler": "euler_ancestral"}
    plain = sample(other, tiny, **options)
    state = torch.get_rng_state()
    expected, seen[:] = [*seen], []
    merged = sample(attach(other, keys_only(), Shuffle), tiny, **options)
    assert seen == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert relative_error(merged, plain) < 1e-5
    assert len(asked) == 1
    sample(attach(other, keys_only()), tiny)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        ("flux", {"depth": 19, "depth_single_blocks": 38}),
        ("z_image", {"n_layers": 30, "n_refiner_layers": 2}),
        ("wan21", {"num_layers": 30}),
    ],
)
def test_asking_takes_a_small_part_of_an_evaluation(monkeypatch, kind, depth):
    """By arithmetic, at the depth of published models."""
    tiny = TINY[kind].of(TINY[kind].settings, **depth)
    model = build(tiny)
    options = {"size": tiny.size(16, 16), "steps": 1, "cfg": 1.0}
    whole, part = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with whole:
        sample(model, tiny, **options)
    ask = asking._asked

    def counted(*arguments):
        with part:
            return ask(*arguments)

    monkeypatch.setattr(asking, "_asked", counted)
    monkeypatch.setattr(attachment, "record_of", unknown_transformer)
    sample(attach(model, keys_only()), tiny, **options)
    assert 0 < part.get_total_flops() < 0.05 * whole.get_total_flops()


def test_what_a_model_keeps_for_later_evaluations_is_as_if_nobody_had_asked(log_messages):
    model, tiny = made(made_up.Caching)
    plain = sample(model, tiny, cfg=1.0)
    model.model.diffusion_model.kept = []
    assert torch.equal(sample(attach(model, keys_only()), tiny, cfg=1.0), plain)
    assert "a Caching keeps something from one evaluation to the next" in log_messages()[-1]


def test_a_model_that_was_asked_is_freed_at_once():
    """ComfyUI collects all garbage before each run while a model that nobody has stays loaded."""
    model, tiny = made(made_up.RegistersAndTextBehind)
    patched = attach(model, keys_only())
    held = weakref.ref(patched)
    gc.collect()
    gc.disable()
    try:
        sample(patched, tiny)
        del patched
        assert held() is None
    finally:
        gc.enable()


def test_a_model_that_cannot_be_asked_runs_unmerged(log_messages, monkeypatch):
    model, tiny = made(made_up.RegistersAndTextBehind)
    plain = sample(model, tiny)

    def fails(*_):
        raise RuntimeError("no pixel today")

    monkeypatch.setattr(asking, "changed", fails)
    assert torch.equal(sample(attach(model, keys_only()), tiny), plain)
    assert "could not be asked (RuntimeError: no pixel today)" in log_messages()[-1]


def test_an_interrupt_while_asking_ends_the_run(monkeypatch):
    model, tiny = made(made_up.RegistersAndTextBehind)
    ended = comfy.model_management.InterruptProcessingException

    def interrupts(*_):
        raise ended

    monkeypatch.setattr(asking, "changed", interrupts)
    with pytest.raises(ended):
        sample(attach(model, keys_only()), tiny)
    assert overridden(model) == []
