"""The soak can fail: it finds what a faulty stand-in for our part does, and nothing in ours."""

import json
from contextlib import closing
from dataclasses import replace
from itertools import count

import pytest
import torch
from comfy.patcher_extension import WrappersMP

from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.presets import PRESETS, settings_of

from .draws import FAULTS, SITUATIONS, Draw, Fault, Sampling, Traits, draw
from .models import TRAITS, Merging, Model
from .runs import Runs
from .tally import Tally, Verdict, failure_text, growth

RUN = Draw(1, "flux", {"preset": "custom", "min_tokens": 1, "ratio": 0.5}, Sampling((6, 8)))
STOPPED = replace(RUN, fault=Fault("exception", 0.9, 1))
FORECAST = replace(RUN, settings={"preset": "fast"}, sampling=Sampling((6, 8), steps=8))


def judged(run, merging):
    """What becomes of a run with some stand-in for our part."""
    with closing(Runs({run.model: Model(run.model, Traits())}, merging)) as runs:
        return runs.run(run)


class Spoils(Merging):
    """Does something to Flux before it is patched."""

    def __init__(self, spoil):
        self.spoil = spoil

    def patch(self, model, settings):
        self.spoil(model.model.diffusion_model)
        return super().patch(model, settings)


def crash(flux):
    raise RuntimeError("on purpose")


def override(flux):
    block = flux.double_blocks[0]
    block.forward = type(block).forward.__get__(block)


def hook(flux):
    flux.double_blocks[0].register_forward_hook(lambda *_: None)


def change_a_weight(flux):
    flux.img_in.weight.data.mul_(1.01)


class Evaluates(Merging):
    """Evaluates the model in another way."""

    def __init__(self, evaluate):
        self.evaluate = evaluate

    def patch(self, model, settings):
        patched = super().patch(model, settings)
        patched.set_model_unet_function_wrapper(self.evaluate)
        return patched


def output_of(apply, given):
    return apply(given["input"], given["timestep"], **given["c"])


def not_finite(apply, given):
    return output_of(apply, given) * torch.nan


def without_errors(apply, given):
    try:
        return output_of(apply, given)
    except Exception:
        return given["input"]


def by_what_was_before():
    """Adds the number of evaluations so far."""
    numbers = count(1)
    return lambda apply, given: output_of(apply, given) + next(numbers)


class DoesNotRemove(Merging):
    def remove(self, model):
        return model.clone()


class HasNoPicture(Merging):
    def report(self, model, samples, image, inputs):
        return torch.zeros(3, 3)


class HasAnotherShape(Merging):
    def patch(self, model, settings):
        def twice(executor, *args, **kwargs):
            return torch.cat([executor(*args, **kwargs)] * 2)

        patched = super().patch(model, settings)
        patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "twice", twice)
        return patched


@pytest.mark.parametrize(
    ("merging", "run", "sentence"),
    [
        (Spoils(crash), RUN, "RuntimeError: on purpose"),
        (Spoils(override), RUN, "flux is not clean: diffusion_model.double_blocks.0"),
        (Spoils(hook), RUN, "flux is not clean: diffusion_model.double_blocks.0"),
        (Spoils(change_a_weight), replace(RUN, number=7), "flux, unpatched, has another result"),
        (Evaluates(not_finite), RUN, "the result is not finite, but the unpatched model's is"),
        (Evaluates(without_errors), STOPPED, "the exception in the middle of the run did not"),
        (Evaluates(by_what_was_before()), STOPPED, "the result after an aborted run is not"),
        (HasAnotherShape(), RUN, "the result is [2, 16, 12, 16] instead of [1, 16, 12, 16]"),
        (HasNoPicture(), replace(RUN, report={"view": "chart"}), "the report is no picture: [3,"),
        (DoesNotRemove(), replace(RUN, removed=True), "merging was removed, and the result is not"),
    ],
)
def test_what_a_faulty_part_does_is_found(merging, run, sentence):
    failures = judged(run, merging).failures
    assert any(failure.startswith(sentence) for failure in failures), failures


def test_tensors_that_stay_alive_are_counted():
    kept = []

    def keep(apply, given):
        output = output_of(apply, given)
        kept.append(output.clone())
        return output

    verdict = judged(RUN, Evaluates(keep))
    assert verdict.leaked == len(kept) == 2
    assert verdict.failures == [
        "2 tensors stay alive: [2, 16, 12, 16] of torch.float32, [2, 16, 12, 16] of torch.float32"
    ]


def test_an_error_that_is_only_logged_is_a_failure(monkeypatch):
    from tome_nodes.report.counts import Counts

    monkeypatch.setattr(Counts, "merged_blocks", property(lambda self: 1 / 0))
    (failure,) = judged(RUN, Merging()).failures
    assert failure.startswith("warned: [ToMe] the report of this run is missing: ZeroDivisionError")


@pytest.mark.parametrize("fault", [Fault("interrupt", 0.9, 1), Fault("exception", None, 1)])
@pytest.mark.parametrize("run", [RUN, FORECAST], ids=["merging", "forecasting"])
def test_our_part_stands_a_fault(run, fault):
    verdict = judged(replace(run, fault=fault, number=7), Merging())
    is_forecast = run is FORECAST
    assert verdict == Verdict(merged=not is_forecast, forecast=is_forecast, stopped=True)


def test_what_the_host_cannot_do_is_no_failure():
    verdict = judged(replace(RUN, neighbours=("NoSuchNode",)), Merging())
    assert verdict == Verdict(refused="KeyError: 'NoSuchNode'")


def test_a_draw_depends_on_its_seed_and_number_alone():
    draws = [draw(3, number, TRAITS) for number in range(50)]
    assert [draw(3, number, TRAITS) for number in reversed(range(50))] == draws[::-1]
    assert draw(4, 0, TRAITS) != draws[0]


def test_draws_are_valid_and_cover_every_option_and_every_part():
    draws = [draw(0, number, TRAITS) for number in range(1000)]
    for each in draws:
        preset, *_ = each.settings.values()
        given = {name: value for name, value in each.settings.items() if name != "preset"}
        ToMeConfig(**settings_of(preset, given))
        assert each.sampling.size[0] * each.sampling.size[1] <= TRAITS[each.model].patches
    drawn = {name: {each.settings.get(name) for each in draws} for name in OPTIONS}
    for name, option in OPTIONS.items():
        assert drawn[name] >= {*option.choices} and len(drawn[name]) > 2, name
    assert {each.settings["preset"] for each in draws} == {*PRESETS, "custom"}
    assert {each.model for each in draws} == {*TRAITS}
    for name in ("neighbours", "replaced", "cloned", "removed", "report"):
        assert 20 < sum(bool(getattr(each, name)) for each in draws) < 700, name
    assert {each.fault.kind for each in draws if each.fault} == {*FAULTS}


def test_a_quick_soak_forecasts_in_every_situation():
    draws = [draw(0, number, TRAITS) for number in range(1, 101)]
    met = {
        name
        for each in draws
        if TRAITS[each.model].is_forecast and each.sampling.steps == 8
        for name in each.neighbours
        if each.settings["preset"] in ("balanced", "fast")
    }
    assert met >= {*SITUATIONS}


def tally(*megabytes, **verdict):
    made = Tally()
    for each in megabytes:
        made.add(RUN, Verdict(**verdict), int(each * 1e6))
    return made


def test_growth_is_judged_after_the_warm_up():
    assert growth([10**9 - 10**6 * max(0, 90 - run) for run in range(1000)]) < 9
    assert growth([10**6 * run for run in range(100)]) == 50
    assert growth([10**6 * run for run in range(1000)]) == 900
    assert growth([5, 10**9]) == 0


@pytest.mark.parametrize(
    ("made", "is_good", "line"),
    [
        (tally(*[900] * 50, *[919] * 50), True, "runs=100 failed=0 leaked_tensors=0"),
        (tally(*[900] * 50, *[921] * 50), False, "runs=100 failed=0 leaked_tensors=0"),
        (tally(900, failures=["it failed"]), False, "runs=1 failed=1 leaked_tensors=0"),
        (tally(900, leaked=3, failures=["3 stay"]), False, "runs=1 failed=1 leaked_tensors=3"),
    ],
)
def test_the_last_line_and_the_exit_code(made, is_good, line):
    assert made.summary().startswith(f"summary: {line} rss_growth_mb={made.growth:.1f} merged=")
    assert made.is_good == is_good


def test_a_failure_is_told_with_its_settings_and_how_to_repeat_it():
    first, settings, repeat = failure_text(STOPPED, ["it failed"], 7).splitlines()
    assert first == "failed: run 1: it failed"
    assert json.loads(settings.removeprefix("  settings: "))["fault"]["place"] == 0.9
    assert repeat == "  repeat: python3 dev.py soak --seed 7 --only 1"
