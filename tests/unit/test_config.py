"""The settings: defaults, ranges, and messages that name what is wrong."""

import dataclasses
import math

import pytest

from tome_nodes.config import RANGES, ToMeConfig


def test_defaults_are_those_of_the_paper_but_for_the_automatic_level():
    config = ToMeConfig()
    assert (config.ratio, config.sx, config.sy, config.use_rand) == (0.5, 2, 2, True)
    assert (config.merge_attn, config.merge_crossattn, config.merge_mlp) == (True, False, False)
    assert config.max_downsample == "auto"
    assert (config.start_percent, config.end_percent, config.seed) == (0.0, 1.0, 0)


def test_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ToMeConfig().ratio = 0.7


@pytest.mark.parametrize("name", RANGES)
def test_limits_are_allowed_and_values_beyond_them_are_named(name):
    least, most = RANGES[name]
    other = {"sx": {"sy": 2}, "sy": {"sx": 2}, "start_percent": {"end_percent": 1.0}}.get(name, {})
    other = {"start_percent": 0.0} if name == "end_percent" else other
    step = 1 if isinstance(most, int) else 0.01
    for value in (least, most):
        assert getattr(ToMeConfig(**{name: value}, **other), name) == value
    for value in (least - step, most + step):
        with pytest.raises(ValueError, match=rf"^{name}={value} .* from {least} to {most}$"):
            ToMeConfig(**{name: value}, **other)


@pytest.mark.parametrize("name", ["ratio", "start_percent", "end_percent"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value} is not allowed"):
        ToMeConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sx": 1, "sy": 1}, "sx=1 with sy=1 is not allowed: a cell of one token"),
        (
            {"start_percent": 0.8, "end_percent": 0.2},
            "start_percent=0.8 is not allowed: it must not be greater than end_percent=0.2",
        ),
        ({"ratio_end": -0.5}, r"ratio_end=-0\.5 is not allowed: it must be -1, to keep ratio"),
        ({"kv_ratio": -0.5}, r"kv_ratio=-0\.5 is not allowed: it must be -1, to keep ratio"),
        ({"strategy": "kmeans"}, r"strategy='kmeans' is not allowed: .* bipartite \| window"),
        ({"scope": None}, r"scope=None is not allowed: .* module \| block \| stack"),
        ({"attn_tokens": "v"}, r"attn_tokens='v' is not allowed: .* q,k,v \| q \| k,v"),
        ({"max_downsample": 3}, "max_downsample=3 is not allowed: .* auto, 1, 2, 4, 8"),
        ({"max_downsample": "2"}, "max_downsample='2' is not allowed"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        ToMeConfig(**settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_rand", 1), ("merge_attn", "yes"), ("sx", 2.0), ("seed", True), ("ratio", "0.5")],
)
def test_wrong_types_are_refused(name, value):
    with pytest.raises(TypeError, match=f"^{name}={value!r} is not allowed"):
        ToMeConfig(**{name: value})
