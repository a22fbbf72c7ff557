"""Presets: what they decide, and what they leave to other inputs."""

import re
from dataclasses import replace

import pytest
from common import input_lengths, relative_error
from every_option import EVERY_OPTION
from host import sample
from models.pipelines import call, make_unet

import tome_nodes
from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.nodes import ToMePatchModel
from tome_nodes.patching import model as patched_model
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.options import OptionError
from tome_nodes.settings.presets import CUSTOM, FREE, PRESETS, settings_of
from tome_nodes.strategies import cells

SIZE = {"size": (16, 16), "steps": 2}
"""A map of 256 tokens, which is large enough for merging to be worth it on a CPU."""

every_preset = pytest.mark.parametrize("preset", PRESETS)


def patched(model, **inputs):
    return ToMePatchModel.execute(model, **inputs)[0]


@every_preset
def test_a_preset_decides_all_but_what_is_free(preset):
    free = {"ratio": 0.3, "seed": 7, "start_percent": 0.1, "end_percent": 0.9, "backend": "torch"}
    assert ToMeConfig(**settings_of(preset, free)) == ToMeConfig(**free, **PRESETS[preset].options)
    assert ToMeConfig(**settings_of(preset, {})) == ToMeConfig(ratio=0.6, **PRESETS[preset].options)
    assert [*FREE] == [name for name, case in EVERY_OPTION.items() if case.is_free]
    given = {"ratio": 0.3, "scope": "stack"}
    assert settings_of(CUSTOM, given) == given


@every_preset
@pytest.mark.parametrize("name", EVERY_OPTION)
def test_an_option_that_does_not_count_is_refused_unless_it_is_at_its_default(preset, name):
    case = EVERY_OPTION[name]
    if case.is_free:
        assert settings_of(preset, {name: case.other})[name] == case.other
        return
    assert settings_of(preset, {name: case.default}) == settings_of(preset, {})
    message = rf"{name}={case.other!r} does not count under preset='{preset}'.* leave {name} out"
    with pytest.raises(OptionError, match=message) as refused:
        settings_of(preset, {"ratio": 0.3, name: case.other})
    assert refused.value.option == name


@every_preset
def test_the_node_runs_the_preset(sd15, preset):
    config = ToMeConfig(ratio=0.4, **PRESETS[preset].options)
    expected = sample(attach(sd15, config), **SIZE)
    actual = sample(patched(sd15, ratio=0.4, preset=preset), **SIZE)
    assert relative_error(actual, expected) == 0
    plain = sample(patched(sd15, ratio=0.4, preset="custom", sx=8, merge_mlp=True), **SIZE)
    assert relative_error(actual, plain) > 1e-3


@pytest.fixture
def large_maps(monkeypatch):
    """Maps that are large in fact would take a minute."""
    monkeypatch.setattr(patched_model, "LARGE", 16 * 16)
    for name in "GROWTH_OF_KEYS", "GROWTH_OF_KEYS_IN_FAST", "GROWTH_OF_STACKS":
        growth = getattr(cells, name)
        monkeypatch.setattr(cells, name, replace(growth, tokens=growth.tokens // 16))


@pytest.mark.parametrize(
    ("preset", "shares"),
    [("balanced", (0.801, 0.6)), ("fast", (0.936, 0.84)), ("paper", (0.6,))],
)
def test_larger_maps_merge_more_and_so_does_each_large_level(
    sd15_of, log_messages, large_maps, preset, shares
):
    sample(patched(sd15_of(2), preset=preset), (32, 32), steps=1)
    (line,) = log_messages()
    sizes = [[*map(int, pair)] for pair in re.findall(r"(\d+) -> (\d+) tokens", line)]
    assert [before for before, _ in sizes] == [32 * 32, 16 * 16][: len(shares)]
    merged = [1 - after / before for before, after in sizes]
    assert merged == pytest.approx(shares, abs=0.01)


@pytest.mark.parametrize(
    ("end", "expected"),
    [(".ff", {64 * 64, 32 * 32, 103}), (".attn1.to_k", {112, 64, 103})],
)
def test_fast_merges_only_keys_in_the_two_largest_maps_of_sd15(sd15_of, large_maps, end, expected):
    model = patched(sd15_of(3), preset="fast")
    layers = [layer for name, layer in model.model.named_modules() if name.endswith(end)]
    with input_lengths(*layers) as lengths:
        sample(model, (64, 64), steps=1)
    assert {*lengths} == expected


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"preset": "balanced", "ratio": 2.0}, "ratio=2.0 is not allowed"),
        ({"preset": "best"}, "preset='best' is not allowed"),
        ({"sx": 4}, "sx=4 does not count"),
        ({"st": None}, "st=None is not allowed"),
    ],
    ids=str,
)
def test_without_a_server_the_node_refuses_when_it_runs(sd15, inputs, sentence):
    assert ToMePatchModel.validate_inputs(model=sd15) is True
    with pytest.raises(OptionError, match=sentence):
        patched(sd15, **inputs)


def test_apply_patch_takes_a_preset(log_messages):
    unet = make_unet("one_level")
    with pytest.raises(ValueError, match="preset='best'"):
        tome_nodes.apply_patch(unet, preset="best")
    with pytest.raises(ValueError, match="sx=4 does not count under preset='balanced'"):
        tome_nodes.apply_patch(unet, preset="balanced", sx=4)
    tome_nodes.apply_patch(unet, 0.25, preset="fast", scope="module", proportional_attn=False)
    call(unet, 999, grid=(16, 16))
    assert log_messages() == [
        "[ToMe] merged 3/3 blocks (256 -> 192 tokens), ratio 0.25, window, stack scope, "
        "keys and values alone at the levels with most tokens"
    ]
