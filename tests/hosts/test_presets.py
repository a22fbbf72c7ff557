"""Presets: what each decides, and what it leaves to other inputs."""

from dataclasses import fields

import pytest
from common import relative_error
from host import sample
from models.pipelines import call, make_unet

import tome_nodes
from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.nodes import ToMePatchModel
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.options import OptionError
from tome_nodes.settings.presets import CUSTOM, FREE, settings_of

SIZE = {"size": (16, 16), "steps": 2}
"""A map of 256 tokens, which is large enough for merging to be worth it on a CPU."""


QUALITY = {"strategy": "window", "attn_tokens": "k,v", "forecast": True}
OPTIONS = {
    "quality": QUALITY,
    "balanced": {**QUALITY, "sx": 4},
    "fast": {
        "strategy": "window",
        "scope": "stack",
        "attn_tokens": "k,v",
        "refresh_steps": 4,
        "forecast": True,
    },
    "paper": {"max_downsample": 1, "min_tokens": 1, "proportional_attn": False},
}
"""What each preset decides, except for options at their defaults."""

every_preset = pytest.mark.parametrize("preset", OPTIONS)


def patched(model, **inputs):
    return ToMePatchModel.execute(model, **inputs)[0]


@every_preset
def test_a_preset_decides_all_but_what_is_free(preset):
    free = {"ratio": 0.3, "seed": 7, "start_percent": 0.1, "end_percent": 0.9, "backend": "torch"}
    assert ToMeConfig(**settings_of(preset, free)) == ToMeConfig(**free, **OPTIONS[preset])
    assert ToMeConfig(**settings_of(preset, {})) == ToMeConfig(ratio=0.6, **OPTIONS[preset])


OTHERS = {
    "strategy": "pool",
    "scope": "block",
    "attn_tokens": "q",
    "max_downsample": 2,
    "merge_attn": False,
    "merge_crossattn": True,
    "merge_mlp": True,
    "st": 3,
    "ratio_end": 0.1,
    "sx": 5,
    "sy": 5,
    "use_rand": False,
    "min_tokens": 7,
    "proportional_attn": False,
    "refresh_steps": 7,
    "forecast": True,
}


@every_preset
@pytest.mark.parametrize("name", OTHERS)
def test_an_option_that_does_not_count_is_refused_unless_it_is_at_its_default(preset, name):
    default = getattr(ToMeConfig(), name)
    assert settings_of(preset, {name: default}) == settings_of(preset, {})
    message = rf"{name}={OTHERS[name]!r} does not count under preset='{preset}'.* leave {name} out"
    with pytest.raises(OptionError, match=message) as refused:
        settings_of(preset, {"ratio": 0.3, name: OTHERS[name]})
    assert refused.value.option == name


def test_every_option_is_free_or_does_not_count():
    assert OTHERS.keys() | set(FREE) == {field.name for field in fields(ToMeConfig)}


def test_custom_decides_nothing():
    given = {"ratio": 0.3, "scope": "block"}
    assert settings_of(CUSTOM, given) == given


@every_preset
def test_the_node_runs_the_preset(sd15, preset):
    config = ToMeConfig(ratio=0.4, **OPTIONS[preset])
    expected = sample(attach(sd15, config), **SIZE)
    actual = sample(patched(sd15, ratio=0.4, preset=preset), **SIZE)
    assert relative_error(actual, expected) == 0
    plain = sample(patched(sd15, ratio=0.4, preset="custom", sx=8, merge_mlp=True), **SIZE)
    assert relative_error(actual, plain) > 1e-3


def test_presets_are_ordered_by_how_much_they_change(sd15):
    plain = sample(sd15, **SIZE)
    errors = {
        preset: relative_error(sample(patched(sd15, preset=preset), **SIZE), plain)
        for preset in OPTIONS
    }
    # Which of the two changes less at the same ratio depends on the model.
    assert min(errors["quality"], errors["balanced"]) > 0
    assert max(errors["quality"], errors["balanced"]) < errors["paper"] < errors["fast"]


def test_without_a_server_the_node_checks_by_itself():
    check = ToMePatchModel.validate_inputs
    assert check() is check(preset="balanced", ratio=None) is True
    assert "ratio=2.0 is" in check(preset="balanced", ratio=2.0, sx=None)
    assert "preset='best'" in check(preset="best")
    assert "sx=4 does not count" in check(sx=4)
    assert check(preset="custom", sx=4) is check(preset=None, sx=4) is True


def test_apply_patch_takes_a_preset(log_messages):
    unet = make_unet("one_level")
    with pytest.raises(ValueError, match="preset='best'"):
        tome_nodes.apply_patch(unet, preset="best")
    tome_nodes.apply_patch(unet, 0.25, preset="fast", scope="module")
    call(unet, 999, grid=(16, 16))
    assert log_messages() == [
        "[ToMe] merged 3/3 blocks (256 -> 192 tokens), ratio 0.25, window, stack scope"
    ]


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [("sx", 4, 2), ("max_downsample", "auto", 1), ("proportional_attn", True, False)],
)
def test_apply_patch_refuses_what_does_not_count(name, value, default):
    unet = make_unet("one_level")
    with pytest.raises(ValueError, match=f"{name}={value!r} does not count under preset='quality'"):
        tome_nodes.apply_patch(unet, preset="quality", **{name: value})
    tome_nodes.apply_patch(unet, preset="quality", **{name: default})
