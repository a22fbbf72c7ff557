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
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.options import OptionError
from tome_nodes.settings.presets import CUSTOM, FREE, PRESETS, settings_of

SIZE = {"size": (16, 16), "steps": 2}
"""A map of 256 tokens, which is large enough for merging to be worth it on a CPU."""

every_preset = pytest.mark.parametrize("preset", PRESETS)


def patched(model, **inputs):
    return ToMePatchModel.execute(model, **inputs)[0]


@every_preset
def test_a_preset_decides_all_but_what_is_free(preset):
    free = {"ratio": 0.3, "seed": 7, "start_percent": 0.1, "end_percent": 0.9, "backend": "torch"}
    decided = {**PRESETS[preset].options, "policy": PRESETS[preset].policy}
    assert ToMeConfig(**settings_of(preset, free)) == ToMeConfig(**free, **decided)
    assert ToMeConfig(**settings_of(preset, {})) == ToMeConfig(ratio=0.6, **decided)
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
    config = ToMeConfig(**settings_of(preset, {"ratio": 0.4}))
    expected = sample(attach(sd15, config), **SIZE)
    actual = sample(patched(sd15, ratio=0.4, preset=preset), **SIZE)
    assert relative_error(actual, expected) == 0
    plain = sample(patched(sd15, ratio=0.4, preset="custom", sx=8, min_tokens=1), **SIZE)
    assert relative_error(actual, plain) > 1e-3


def as_if_larger(name):
    """The settings of a preset by which maps count as 16 times as large, for which runs would take
    a minute."""
    policy = PRESETS[name].policy
    policy = replace(
        policy,
        keys=replace(policy.keys, tokens=policy.keys.tokens / 16),
        stacks=replace(policy.stacks, tokens=policy.stacks.tokens / 16),
        deeper_from=policy.deeper_from / 16,
    )
    return ToMeConfig(**settings_of(name, {}) | {"policy": policy})


@pytest.mark.parametrize(
    ("preset", "shares"),
    [("balanced", (0.801, 0.6)), ("fast", (0.936, 0.84)), ("paper", (0.6,))],
)
def test_larger_maps_merge_more_and_so_does_each_large_level(models, log_messages, preset, shares):
    sample(attach(models("sd15"), as_if_larger(preset)), (32, 32), steps=1)
    (line,) = log_messages()
    sizes = [[*map(int, pair)] for pair in re.findall(r"(\d+) -> (\d+) tokens", line)]
    assert [before for before, _ in sizes] == [32 * 32, 16 * 16][: len(shares)]
    merged = [1 - after / before for before, after in sizes]
    assert merged == pytest.approx(shares, abs=0.01)


@pytest.mark.parametrize(
    ("end", "expected"),
    [(".ff", {64 * 128, 32 * 64, 186}), (".attn1.to_k", {128, 80, 186})],
)
def test_fast_merges_only_keys_in_the_two_largest_maps_of_sd15(sd15_of, end, expected):
    model = attach(sd15_of(3), as_if_larger("fast"))
    layers = [layer for name, layer in model.model.named_modules() if name.endswith(end)]
    with input_lengths(*layers) as lengths:
        sample(model, (64, 128), steps=1)
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


@pytest.mark.parametrize("is_apart", [True, False])
def test_the_line_of_fast_tells_of_keys_alone_only_where_they_merged(log_messages, is_apart):
    """Attention to text, as in the x4 upscaler, merges with its stack at all levels."""
    unet = make_unet(only_cross_attention=(not is_apart,) * 3, mid_block_type=None)
    tome_nodes.apply_patch(unet, preset="fast")
    call(unet, 999, grid=(32, 32))
    (line,) = log_messages()
    assert line.startswith("[ToMe] merged 6/6 blocks")
    assert ("keys and values alone" in line) == is_apart
