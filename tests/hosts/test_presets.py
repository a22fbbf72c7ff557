"""Presets: what each decides, and what it leaves to the other inputs."""

from dataclasses import replace

import pytest
from common import relative_error
from host import sample
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes.config import ToMeConfig
from tome_nodes.hosts.comfyui.attachment import attach
from tome_nodes.nodes import ToMePatchModel
from tome_nodes.presets import CUSTOM, PRESETS, keys_to_merge, settings_of

SIZE = {"size": (16, 16), "steps": 2}
"""A map of 256 tokens, which is enough to pay on a CPU."""


QUALITY = {"strategy": "window", "attn_tokens": "k,v"}
OPTIONS = {
    "quality": QUALITY,
    "balanced": {**QUALITY, "sx": 4},
    "fast": {"strategy": "window", "scope": "stack", "reuse_steps": 1},
    "paper": {"max_downsample": 1, "min_tokens": 1, "proportional_attn": False},
}
"""What each preset decides, but for the ratio; the rest is as by default."""

every_preset = pytest.mark.parametrize("preset", OPTIONS)


def ratio_of(preset, ratio):
    """The ratio that a preset makes of one; that of balanced was measured."""
    return {0.3: 0.404, 0.4: 0.523, 0.5: 0.634}[ratio] if preset == "balanced" else ratio


def patched(model, **inputs):
    return ToMePatchModel.execute(model, **inputs)[0]


def test_there_are_these_presets():
    assert [*PRESETS] == [*OPTIONS]


@every_preset
def test_a_preset_decides_all_but_what_is_free(preset):
    free = {"ratio": 0.3, "seed": 7, "start_percent": 0.1, "end_percent": 0.9, "backend": "torch"}
    others = {"scope": "block", "strategy": "cluster", "sx": 5, "merge_mlp": True, "kv_ratio": 0.1}
    config = ToMeConfig(**settings_of(preset, {**free, **others}))
    assert config.ratio == pytest.approx(ratio_of(preset, 0.3), abs=5e-4)
    assert replace(config, ratio=0.3) == ToMeConfig(**free, **OPTIONS[preset])
    for name, value in others.items():
        assert getattr(config, name) != value


def test_custom_decides_nothing():
    given = {"ratio": 0.3, "scope": "block"}
    assert settings_of(CUSTOM, given) == given


def test_an_unknown_preset_is_named():
    with pytest.raises(ValueError, match=r"preset='best' is not allowed: it must be one of .*fast"):
        settings_of("best", {})


@every_preset
@pytest.mark.parametrize(
    ("ratio", "error", "told"),
    [
        (1.2, ValueError, "ratio=1.2 is not"),
        (float("nan"), ValueError, "ratio=nan is not"),
        ("0.5", TypeError, "ratio='0.5' is not"),
    ],
)
def test_a_wrong_ratio_is_told_as_it_was_given(preset, ratio, error, told):
    with pytest.raises(error, match=told):
        settings_of(preset, {"ratio": ratio})


@pytest.mark.parametrize("ratio", [0.3, 0.4, 0.5])
def test_keys_to_merge_are_as_measured(ratio):
    assert keys_to_merge(ratio) == pytest.approx(ratio_of("balanced", ratio), abs=5e-4)


@given(st.integers(0, 95))
def test_keys_to_merge_are_more_than_the_ratio(percent):
    ratio = percent / 100
    keys = keys_to_merge(ratio)
    assert ratio <= keys <= 0.95
    ToMeConfig(ratio=keys)
    # As much attention as with fewer queries and keys, or more, by the queries that stay.
    assert (1 - ratio) ** 2 <= 1 - keys or keys == 0.95


@every_preset
def test_the_node_runs_the_preset(sd15, preset):
    config = ToMeConfig(ratio=ratio_of(preset, 0.4), **OPTIONS[preset])
    expected = sample(attach(sd15, config), **SIZE)
    actual = sample(patched(sd15, ratio=0.4, preset=preset, sx=8, merge_mlp=True), **SIZE)
    assert relative_error(actual, expected) == 0
    plain = sample(patched(sd15, ratio=0.4, sx=8, merge_mlp=True), **SIZE)
    assert relative_error(actual, plain) > 1e-3


def test_a_graph_from_before_there_were_presets_counts_its_inputs(sd15):
    settings = {"ratio": 0.6, "scope": "block", "merge_mlp": True}
    expected = sample(attach(sd15, ToMeConfig(**settings)), **SIZE)
    assert relative_error(sample(patched(sd15, **settings), **SIZE), expected) == 0


def test_presets_are_ordered_by_likeness(sd15):
    plain = sample(sd15, **SIZE)
    errors = {
        preset: relative_error(sample(patched(sd15, preset=preset), **SIZE), plain)
        for preset in OPTIONS
    }
    assert 0 < errors["quality"] < errors["balanced"] < errors["paper"] < errors["fast"]


def test_what_does_not_count_is_not_refused():
    wrong = {"sx": 1, "sy": 1, "kv_ratio": 7.0}
    assert ToMePatchModel.validate_inputs(preset="balanced", **wrong) is True
    assert "kv_ratio=7.0" in ToMePatchModel.validate_inputs(preset="custom", **wrong)
    assert "kv_ratio=7.0" in ToMePatchModel.validate_inputs(**wrong)
    assert "ratio=2" in ToMePatchModel.validate_inputs(preset="balanced", ratio=2.0)
    assert "preset='best'" in ToMePatchModel.validate_inputs(preset="best")


def test_apply_patch_takes_a_preset(told):
    from pipelines import call, make_unet

    import tome_nodes

    unet = make_unet("one_level")
    with pytest.raises(ValueError, match="preset='best'"):
        tome_nodes.apply_patch(unet, preset="best")
    call(tome_nodes.apply_patch(unet, 0.25, preset="fast", scope="module"), grid=(16, 16))
    assert told() == [
        "[ToMe] merged 3/3 blocks (256 -> 192 tokens), ratio 0.25, window, stack scope"
    ]
