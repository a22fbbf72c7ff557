"""What ComfyUI and its nodes keep of ranges where something changes the model's answer."""

from functools import partial
from types import SimpleNamespace

import pytest

from tome_nodes.comfyui.conditions import conditions_of

GUIDER = SimpleNamespace(cfg=7.0, conds={})


class Adapter:
    """A patch that keeps what it was given, as IP-Adapters do."""

    def __init__(self, **kwargs):
        self.kwargs = [kwargs]

    def __call__(self, *args):
        return args

    def method(self, *args):
        return args


def closure(end):
    sigma_end = end

    def patch(*args):
        return args if args[0] > sigma_end else None

    return patch


def takes(*args, sigma_end):
    return args, sigma_end


HOLDERS = {
    "variables": closure(2.0),
    "an object": Adapter(sigma_end=2.0),
    "a method": Adapter(sigma_end=2.0).method,
    "arguments given before": partial(takes, sigma_end=2.0),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize(
    "placed",
    [
        lambda patch: {"transformer_options": {"patches": {"attn2_patch": [patch]}}},
        lambda patch: {
            "transformer_options": {"patches_replace": {"attn2": {("input", 1): patch}}}
        },
        lambda patch: {"model_function_wrapper": patch},
        lambda patch: {"sampler_post_cfg_function": [patch]},
    ],
    ids=["patch", "replacement", "wrapper", "guidance"],
)
def test_the_course_changes_where_a_range_ends_that_a_patch_keeps(holder, placed):
    options = placed(holder)
    before, still, after = (conditions_of(GUIDER, options, sigma) for sigma in (4.0, 2.5, 1.5))
    assert before == still != after


def test_numbers_that_are_no_noise_levels_change_nothing():
    options = {"transformer_options": {"patches": {"attn2_patch": [Adapter(weight=2.0)]}}}
    assert conditions_of(GUIDER, options, 4.0) == conditions_of(GUIDER, options, 1.5)


@pytest.mark.parametrize(
    "patch",
    [print, object(), SimpleNamespace(keywords=1)],
    ids=["built-in", "without attributes", "with other keywords"],
)
def test_what_a_patch_is_made_of_does_not_matter(patch):
    options = {"transformer_options": {"patches": {"attn1_patch": [patch]}}}
    assert conditions_of(GUIDER, options, 4.0) == conditions_of(GUIDER, options, 1.5)
