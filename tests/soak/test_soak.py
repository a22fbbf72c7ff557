"""The soak draws runs of everything, and our part stands what is done to it."""

import math
from contextlib import closing

import pytest

from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.presets import PRESETS, settings_of

from .draws import FAULTS, FORECAST_EVERY, SITUATIONS, Draw, Fault, Traits, draw
from .models import TRAITS, Merging, model_of
from .runs import Runs
from .tally import Verdict

RUNS = {
    "merged": ({"preset": "custom", "min_tokens": 1, "ratio": 0.5}, 2),
    "forecast": ({"preset": "fast"}, 8),
}


@pytest.mark.parametrize("fault", [Fault("interrupt", 0.9, 1), Fault("exception", None, 1)])
@pytest.mark.parametrize("done", RUNS)
def test_our_part_stands_a_fault(done, fault):
    settings, steps = RUNS[done]
    run = Draw(7, "flux", settings, {"size": (6, 8), "steps": steps}, fault=fault)
    with closing(Runs({"flux": model_of("flux", Traits())}, Merging())) as runs:
        assert runs.run(run) == Verdict([], {"stopped", done})


def test_draws_are_valid_and_cover_every_option_and_every_part():
    draws = [draw(0, number, TRAITS) for number in range(1, 1001)]
    for run in draws:
        given = {name: value for name, value in run.settings.items() if name != "preset"}
        ToMeConfig(**settings_of(run.settings["preset"], given))
        assert math.prod(run.sampling["size"]) <= TRAITS[run.model].patches
    for name, option in OPTIONS.items():
        drawn = {run.settings.get(name) for run in draws}
        assert drawn >= {*option.choices} and len(drawn) > 2, name
    assert {run.settings["preset"] for run in draws} == {*PRESETS, "custom"}
    assert {run.model for run in draws} == {*TRAITS}
    for name in ("neighbours", "replaced", "cloned", "removed", "report"):
        assert 20 < sum(bool(getattr(run, name)) for run in draws) < 700, name
    assert {run.fault.kind for run in draws if run.fault} == {*FAULTS}
    # In the hundred runs of a quick soak.
    forecast = [run for run in draws[:100] if run.number % FORECAST_EVERY == 0]
    assert {name for run in forecast for name in run.neighbours} == {*SITUATIONS}
    assert {run.sampling["steps"] for run in forecast} == {8}
