"""What the log advises where nothing was done is the least change that helps, and it does help."""

import comfy.samplers
import pytest
from models.comfyui import KINDS, sample

from tome_nodes import reasons
from tome_nodes.comfyui.advice import scheduler_instead
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

SIZE = 24, 24
"""576 tokens in SD 1.5: too few."""
SAMPLERS = "take euler, dpmpp_2m or res_multistep"


@pytest.fixture(autouse=True)
def real_sizes(change_policy):
    change_policy(least_tokens=768)


def run(models, preset="balanced", kind="sd15", size=SIZE, **options):
    """The record of a run."""
    config = ToMeConfig(**settings_of(preset, {})) if isinstance(preset, str) else preset
    patched = attach(models(kind), config)
    sample(patched, KINDS[kind], size, **{"cfg": 1.0, "scheduler": "normal", **options})
    return last_run(patched)


FLUX = {"kind": "flux", "size": (8, 8), "steps": 20}


@pytest.mark.parametrize(
    ("given", "advice", "change"),
    [
        ({**FLUX, "sampler": "dpmpp_3m_sde"}, SAMPLERS, {"sampler": "dpmpp_2m"}),
        ({**FLUX, "sampler": "deis", "steps": 10}, SAMPLERS, {"sampler": "res_multistep"}),
        (
            {**FLUX, "sampler": "dpmpp_2m", "scheduler": "linear_quadratic", "steps": 10},
            *("take the scheduler simple", {"scheduler": "simple"}),
        ),
        (
            {"sampler": "lcm", "steps": 4},
            "take a picture 1.25 times as wide and high, or leave ToMe out",
            {"size": (30, 30)},
        ),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_the_advice_is_the_least_change_and_helps(models, given, advice, change):
    idle = run(models, **given)
    assert idle.nothing.endswith(f"; {advice}")
    # There is one piece of advice, and none that is in use.
    assert idle.nothing.count("; take ") == 1
    assert run(models, **{**given, **change}).nothing is None


@pytest.mark.parametrize(("name", "least"), [("balanced", 6), ("fast", 5)])
def test_where_nothing_helps_the_line_says_so(models, name, least):
    nothing = run(models, name, steps=4, size=(8, 8)).nothing
    assert nothing.startswith(
        "nothing merged: 64 tokens are fewer than 768, the least that pays off; no step was "
        f"shallow: a run of 4 is too short, shallow steps need {least};"
    )
    assert nothing.endswith("; leave ToMe out") and "take " not in nothing


@pytest.mark.parametrize(("least", "has_fast"), [(0.1, True), (0.9, False)])
def test_fast_is_advised_only_if_it_saves_enough(models, change_policy, least, has_fast):
    change_policy(least_tokens=64, least_saved=least)
    given = {"kind": "sdxl", "size": (32, 32), "steps": 4}
    idle = run(models, **given)
    fast = run(models, **{**given, "preset": "fast"})
    assert bool(fast.counts.merged) == has_fast
    advice = idle.nothing.rpartition("; ")[2]
    if has_fast:
        saved = fast.gain.words.partition("measured: ")[2].partition("%")[0]
        assert advice == f"take preset fast, under which merging saves {saved}% of the work"
    else:
        assert advice == reasons.LEAVE_OUT


def test_a_merged_run_hears_of_no_change_that_does_not_help(models):
    """To take fewer steps would make it shorter still."""
    line = run(models, "fast", size=(32, 32), steps=4).line
    assert line.startswith("merged ")
    assert line.endswith("; no step was shallow: a run of 4 is too short, shallow steps need 5")


@pytest.mark.parametrize("kind", ["sd15", "flux"])
@pytest.mark.parametrize("total", [20, 30])
@pytest.mark.parametrize("used", ["simple", "sgm_uniform", "normal", "beta", "karras"])
def test_no_scheduler_is_advised_that_is_in_use(models, kind, total, used):
    sampling = models(kind).get_model_object("model_sampling")
    schedule = comfy.samplers.calculate_sigmas(sampling, used, total).tolist()[-21:]
    tried = []

    def is_forecast(levels):
        tried.append(levels)
        return len(tried) == 2

    expected = [name for name in ("simple", "sgm_uniform", "normal", "beta") if name != used]
    found = scheduler_instead(sampling, schedule, is_forecast)
    assert len(tried) == 2 and found in expected
    assert all(len(levels) == 21 and levels[-1] == 0 for levels in tried)
    # They begin as the run does.
    assert all(levels[0] == pytest.approx(schedule[0], rel=0.1, abs=0.05) for levels in tried)
