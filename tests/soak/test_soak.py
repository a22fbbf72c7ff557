"""The soak can fail: it finds what a faulty stand-in for our part does, and nothing in ours."""

import json
import math
from contextlib import closing, suppress
from dataclasses import replace
from itertools import count

import pytest
import torch
from comfy.patcher_extension import WrappersMP

from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.presets import PRESETS, settings_of

from .draws import FAULTS, FORECAST_EVERY, SITUATIONS, Draw, Fault, Traits, draw
from .models import TRAITS, Merging, model_of
from .runs import Runs
from .tally import Verdict, failure_text, summary

SETTINGS = {"preset": "custom", "min_tokens": 1, "ratio": 0.5}
RUN = Draw(1, "flux", SETTINGS, {"size": (6, 8), "steps": 2})
STOPPED = replace(RUN, fault=Fault("exception", 0.9, 1))
FORECAST = replace(RUN, settings={"preset": "fast"}, sampling={"size": (6, 8), "steps": 8})


def judged(run, merging):
    with closing(Runs({run.model: model_of(run.model, Traits())}, merging)) as runs:
        return runs.run(run)


class Faulty(Merging):
    """Spoils Flux before it is patched, and the model that it returns after that."""

    def __init__(self, plain=lambda flux: None, patched=lambda model: None):
        self.spoil_plain, self.spoil_patched = plain, patched

    def patch(self, model, settings):
        self.spoil_plain(model.model.diffusion_model)
        patched = super().patch(model, settings)
        self.spoil_patched(patched)
        return patched


class Forgetful(Merging):
    """Does not remove our node, and makes no picture."""

    def remove(self, model):
        return model.clone()

    def report(self, model, samples, image, inputs):
        return torch.zeros(3, 3)


def evaluates(change, errors=()):
    """Another part, which changes each output of the model, and suppresses its errors."""

    def evaluate(apply, given):
        with suppress(*errors):
            return change(apply(given["input"], given["timestep"], **given["c"]))
        return given["input"]

    return Faulty(patched=lambda model: model.set_model_unet_function_wrapper(evaluate))


def sample_twice(model):
    def twice(executor, *args, **kwargs):
        return torch.cat([executor(*args, **kwargs)] * 2)

    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "twice", twice)


def override(flux):
    block = flux.double_blocks[0]
    block.forward = type(block).forward.__get__(block)


def hook(flux):
    flux.double_blocks[0].register_forward_hook(lambda *_: None)


# By what was before.
evaluations = count(1)


@pytest.mark.parametrize(
    ("merging", "run", "sentence"),
    [
        (Faulty(lambda flux: 1 / 0), RUN, "ZeroDivisionError: division by zero"),
        (Faulty(override), RUN, "flux is not clean: diffusion_model.double_blocks.0"),
        (Faulty(hook), RUN, "flux is not clean: diffusion_model.double_blocks.0"),
        (
            Faulty(lambda flux: flux.img_in.weight.data.mul_(1.01)),
            *(replace(RUN, number=7), "flux, unpatched, has another result"),
        ),
        (evaluates(lambda x: x * torch.nan), RUN, "the result is not finite, but"),
        (evaluates(lambda x: x, [Exception]), STOPPED, "the exception in the middle of the run"),
        (evaluates(lambda x: x + next(evaluations)), STOPPED, "the result after an aborted run is"),
        (Faulty(patched=sample_twice), RUN, "the result is [2, 16, 12, 16] instead of"),
        (Forgetful(), replace(RUN, report={"view": "chart"}), "the report is no picture: [3,"),
        (Forgetful(), replace(RUN, removed=True), "merging was removed, and the result is not"),
    ],
)
def test_what_a_faulty_part_does_is_found(merging, run, sentence):
    failures = judged(run, merging).failures
    assert any(failure.startswith(sentence) for failure in failures), failures


def test_tensors_that_stay_alive_are_counted():
    kept = []

    def keep(output):
        kept.append(output.clone())
        return output

    verdict = judged(RUN, evaluates(keep))
    assert len(kept) == 2
    assert verdict.failures == [
        "2 tensors stay alive: [2, 16, 12, 16] of torch.float32, [2, 16, 12, 16] of torch.float32"
    ]


def test_an_error_that_is_only_logged_is_a_failure(monkeypatch):
    from tome_nodes.run.counts import Counts

    monkeypatch.setattr(Counts, "merged_blocks", property(lambda self: 1 / 0))
    (failure,) = judged(RUN, Merging()).failures
    assert failure.startswith("warned: [ToMe] could not log this run: ZeroDivisionError")


@pytest.mark.parametrize("fault", [Fault("interrupt", 0.9, 1), Fault("exception", None, 1)])
@pytest.mark.parametrize("run", [RUN, FORECAST], ids=["merging", "forecasting"])
def test_our_part_stands_a_fault(run, fault):
    verdict = judged(replace(run, fault=fault, number=7), Merging())
    assert verdict == Verdict([], {"stopped", "forecast" if run is FORECAST else "merged"})


def test_what_the_host_cannot_do_is_no_failure():
    verdict = judged(replace(RUN, neighbours=("NoSuchNode",)), Merging())
    assert verdict == Verdict([], {"refused"})


def test_a_draw_depends_on_its_seed_and_number_alone():
    draws = [draw(3, number, TRAITS) for number in range(50)]
    assert [draw(3, number, TRAITS) for number in reversed(range(50))] == draws[::-1]
    assert draw(4, 0, TRAITS) != draws[0]


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


@pytest.mark.parametrize(
    ("megabytes", "verdict", "is_good", "line"),
    [
        ([*[900] * 50, *[919] * 50], Verdict(), True, "runs=100 failed=0 rss_growth_mb=19.0"),
        ([*[900] * 50, *[921] * 50], Verdict(), False, "runs=100 failed=0 rss_growth_mb=21.0"),
        ([900], Verdict(["it failed"]), False, "runs=1 failed=1 rss_growth_mb=0.0"),
        # Growth in the warm-up, and too few runs to tell.
        ([*range(90), *[90] * 910], Verdict(), True, "runs=1000 failed=0 rss_growth_mb=0.5"),
        ([5, 900], Verdict(), True, "runs=2 failed=0 rss_growth_mb=0.0"),
    ],
)
def test_the_last_line_and_the_exit_code(megabytes, verdict, is_good, line):
    told = summary([verdict] * len(megabytes), [memory * 10**6 for memory in megabytes])
    assert told == (f"summary: {line} merged=0 shallow=0 forecast=0 refused=0 stopped=0", is_good)


def test_a_failure_is_told_with_its_settings_and_how_to_repeat_it():
    first, settings, repeat = failure_text(STOPPED, ["it failed"], 7).splitlines()
    assert first == "failed: run 1: it failed"
    assert json.loads(settings.removeprefix("  settings: "))["fault"]["place"] == 0.9
    assert repeat == "  repeat: python3 dev.py soak --seed 7 --only 1"
