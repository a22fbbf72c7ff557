"""The settings: defaults, ranges, and messages that name what is wrong."""

import dataclasses
import math

import pytest
from every_option import EVERY_OPTION

from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.options import OptionError
from tome_nodes.settings.policy import EVEN, PLAIN
from tome_nodes.settings.presets import PRESETS

LIMITS = {name: case.limits for name, case in EVERY_OPTION.items() if case.limits is not None}

OF_WRONG_TYPE = {bool: (0, 1, "yes", None), int: (2.0, True), float: ("0.5", True, False)}


def test_the_options_are_those_that_tests_know():
    numbers = [option for option in OPTIONS.values() if type(option.default) in (int, float)]
    assert {option.name: (option.least, option.most) for option in numbers} == LIMITS
    defaults = [(name, case.default) for name, case in EVERY_OPTION.items()]
    settings = dataclasses.asdict(ToMeConfig())
    # Presets set it.
    assert settings.pop("policy") == dataclasses.asdict(PLAIN)
    assert [*settings.items()] == defaults
    assert ToMeConfig(ratio_end=-1) == ToMeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        ToMeConfig().ratio = 0.7


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_allowed_and_values_beyond_them_are_named(name):
    least, most = LIMITS[name]
    step = 1 if isinstance(most, int) else 0.01
    for value in (least, most):
        assert getattr(ToMeConfig(**{name: value}), name) == value
    beyond = [least - step, most + step]
    if isinstance(most, float):
        beyond += [math.nan, math.inf, -math.inf]
    for value in beyond:
        with pytest.raises(ValueError, match=rf"^{name}={value} .* from {least} to {most}$"):
            ToMeConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sx": 1, "sy": 1}, "sx=1 with sy=1 is not allowed: a cell of one token"),
        ({"ratio_end": -0.5}, r"ratio_end=-0\.5 is not allowed: it must be -1, to keep ratio"),
        ({"ratio_end": -2.0}, r"ratio_end=-2\.0 is not allowed: .* or from 0\.0 to 0\.95$"),
        ({"strategy": "kmeans"}, r"'kmeans' is not allowed: .* bipartite \| window \| cluster$"),
        ({"backend": "cuda"}, r"backend='cuda' is not allowed: .* auto \| torch \| triton$"),
        ({"scope": None}, r"scope=None is not allowed: .* module \| stack$"),
        ({"attn_tokens": "v"}, r"attn_tokens='v' is not allowed: .* q,k,v \| k,v$"),
        ({"max_downsample": "2"}, "max_downsample='2' is not allowed"),
        # Both are equal to 1.
        ({"max_downsample": True}, "max_downsample=True is not allowed"),
        ({"max_downsample": 1.0}, r"max_downsample=1\.0 is not allowed"),
    ],
)
def test_contradictions_are_refused_in_a_sentence_that_names_the_option(settings, sentence):
    with pytest.raises(OptionError, match=sentence) as refused:
        ToMeConfig(**settings)
    assert refused.value.option == next(iter(settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (option.name, value)
        for option in OPTIONS.values()
        for value in OF_WRONG_TYPE.get(type(option.default), ())
    ],
)
def test_wrong_types_are_refused(name, value):
    with pytest.raises(TypeError, match=f"^{name}={value!r} is not allowed") as refused:
        ToMeConfig(**{name: value})
    assert refused.value.option == name


def test_presets_that_merge_more_in_larger_maps_merge_nothing_where_that_does_not_pay():
    policies = [preset.policy for preset in PRESETS.values()]
    assert [policy.least_saved for policy in policies if policy.keys != EVEN] == [0.05, 0.05]
    assert all(policy == PLAIN for policy in policies if policy.keys == EVEN)
    assert PLAIN.least_tokens == 768
