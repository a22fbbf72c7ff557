"""What earlier versions had: it is ignored, read as something else, or refused with a way out."""

import pytest

from tome_nodes.settings.config import OPTIONS
from tome_nodes.settings.options import OptionError
from tome_nodes.settings.presets import PRESET, settings_of
from tome_nodes.settings.removed import current


def test_what_is_still_there_is_left_alone():
    given = {"preset": "fast", "ratio": 0.3, "scope": "stack", "max_downsample": [], "sx": None}
    assert current(given) == given


def test_an_option_that_is_gone_is_ignored_at_its_default():
    assert current({"sx": 3, "st": 0}) == {"sx": 3}
    assert settings_of("custom", {"sx": 3, "st": 0}) == {"sx": 3}
    assert settings_of("fast", {"st": 0}) == settings_of("fast", {})


def test_quality_is_read_as_balanced():
    assert settings_of("quality", {"ratio": 0.3}) == settings_of("balanced", {"ratio": 0.3})


@pytest.mark.parametrize("preset", ["custom", "fast", "quality"])
@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("st", 1, "st=1 is not allowed: .* leave st out"),
        ("st", None, "st=None is not allowed: .* leave st out"),
        ("st", [], "st=<list> is not allowed: .* leave st out"),
        ("scope", "block", "scope='block' is gone: take scope='stack' instead"),
        ("strategy", "pool", "strategy='pool' is gone: take strategy='window' instead"),
        ("attn_tokens", "q", "attn_tokens='q' is gone: take attn_tokens='k,v' instead"),
    ],
)
def test_what_is_gone_is_refused_with_what_to_take_instead(preset, name, value, instead):
    with pytest.raises(OptionError, match=instead) as refused:
        settings_of(preset, {"ratio": 0.3, name: value})
    assert refused.value.option == name


@pytest.mark.parametrize(
    ("name", "gone"),
    [("preset", "quality"), ("scope", "block"), ("strategy", "pool"), ("attn_tokens", "q")],
)
def test_what_is_gone_is_no_choice(name, gone):
    assert gone not in ({"preset": PRESET} | dict(OPTIONS))[name].choices
