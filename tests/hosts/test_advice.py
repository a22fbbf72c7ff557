"""What the log says to do where nothing was done does help."""

from itertools import product

import comfy.samplers
import pytest
from models.comfyui import KINDS, sample

from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of
from tome_nodes.skipping.steps import is_even, log_snrs, steps_that_run

SIZE = 24, 24
"""576 tokens in SD 1.5: too few."""


@pytest.fixture(autouse=True)
def real_sizes(change_policy):
    change_policy(least_tokens=768)


def run(models, preset="balanced", kind="sd15", size=SIZE, **options):
    """The record of a run."""
    config = ToMeConfig(**settings_of(preset, {})) if isinstance(preset, str) else preset
    patched = attach(models(kind), config)
    sample(patched, KINDS[kind], size, **{"cfg": 1.0, "scheduler": "normal", **options})
    return last_run(patched)


FLUX = {"kind": "flux", "size": (8, 8)}


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": "dpmpp_3m_sde", "steps": 20},
        {"sampler": "deis", "steps": 6, "scheduler": "linear_quadratic"},
        {"sampler": "dpmpp_2m", "steps": 6},
        {"sampler": "dpmpp_2m", "steps": 10, "scheduler": "linear_quadratic"},
    ],
    ids=lambda given: " ".join(map(str, given.values())),
)
def test_what_is_advised_where_no_step_is_forecast_helps(models, given):
    idle = run(models, **FLUX, **given)
    assert idle.nothing.endswith("; take the sampler euler and the scheduler simple")
    change = {"sampler": "euler", "scheduler": "simple"}
    assert run(models, **FLUX, **{**given, **change}).nothing is None


@pytest.mark.parametrize("kind", ["sd15", "flux", "wan21"])
@pytest.mark.parametrize("ratio", [0.01, 0.99])
def test_under_the_scheduler_that_is_advised_some_step_of_every_run_is_even(models, kind, ratio):
    sampling = models(kind).get_model_object("model_sampling")
    for count, longer in product(range(4, 51), (1.0, 1.4, 2.5, 5.0)):
        schedule = comfy.samplers.calculate_sigmas(sampling, "simple", int(longer * count))
        levels = log_snrs(schedule[-count - 1 : -1].tolist(), kind != "sd15")
        running = steps_that_run(ratio, count, is_settled=longer > 1)
        assert any(is_even(levels, index) for index in {*range(count)} - running)


@pytest.mark.parametrize("name", ["balanced", "fast"])
def test_where_nothing_helps_the_line_says_so(models, name):
    nothing = run(models, name, steps=4, size=(8, 8)).nothing
    assert nothing == (
        "no step was shallow: a run of 4 is too short, shallow steps need 5; nothing "
        "merged: 64 tokens are fewer than 768, the least that pays off; leave ToMe out"
    )


@pytest.mark.parametrize(("least", "has_fast"), [(0.1, True), (0.9, False)])
def test_fast_is_advised_only_if_it_saves_enough(models, change_policy, least, has_fast):
    change_policy(least_tokens=64, least_saved=least)
    given = {"kind": "sdxl", "size": (32, 32), "steps": 4}
    idle = run(models, **given)
    fast = run(models, **{**given, "preset": "fast"})
    assert bool(fast.counts.merged) == has_fast
    assert idle.nothing.endswith("; take preset fast" if has_fast else "; leave ToMe out")


@pytest.mark.parametrize(
    ("side", "ratio", "advice"),
    [
        (64, 0.5, "use preset fast, or set max_downsample to auto under preset custom"),
        (32, 0.5, "set max_downsample to auto under preset custom"),
        (16, 0.004, "leave ToMe out"),
    ],
)
def test_where_levels_are_left_out_only_what_would_merge_is_advised(models, side, ratio, advice):
    given = {"kind": "sdxl", "size": (side, side), "steps": 2}
    options = settings_of("paper", {"ratio": ratio})
    assert run(models, ToMeConfig(**options), **given).nothing.endswith(f" start at 2; {advice}")
    for words, changed in (
        ("fast", settings_of("fast", {"ratio": ratio})),
        ("auto", {**options, "max_downsample": "auto"}),
    ):
        merged = run(models, ToMeConfig(**changed), **given).counts.merged
        assert bool(merged) == (words in advice)


def test_a_merged_run_hears_of_no_change_that_does_not_help(models):
    """To take fewer steps would make it shorter still."""
    line = run(models, "fast", size=(32, 32), steps=4).line
    assert line.startswith("merged ")
    assert line.endswith("; no step was shallow: a run of 4 is too short, shallow steps need 5")
