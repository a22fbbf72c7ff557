"""The soak can fail: it finds what a faulty stand-in for our part does, and nothing in ours."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.presets import PRESETS, settings_of

from .draws import FAULTS, Beside, Draw, Fault, Sampling, Traits, draw
from .merging import Merging
from .models import transformer, unet_of_diffusers
from .runs import Runs
from .tally import Tally, Verdict, failure_text, growth

RUN = Draw(1, "flux", {"preset": "custom", "min_tokens": 1, "ratio": 0.5}, Sampling((6, 8)))
STOPPED = replace(RUN, fault=Fault("exception", 0.9, 1))
ON_DIFFUSERS = replace(RUN, model="diffusers", sampling=Sampling((6, 8), steps=1))
BESIDE = replace(RUN, beside=Beside(False, True, replace(RUN, model="sd3")))


@pytest.fixture
def judged():
    """What becomes of a run with some stand-in for our part."""
    makers = {
        "flux": lambda: transformer("flux"),
        "sd3": lambda: transformer("sd3"),
        "diffusers": unet_of_diffusers,
    }

    def judge(run, merging):
        beside = [] if run.beside is None else [run.beside.draw.model]
        models = {name: makers[name]() for name in (run.model, *beside)}
        with closing(Runs(models, merging)) as runs:
            return runs.run(run)

    return judge


class Crashes(Merging):
    def patch(self, model, settings):
        raise RuntimeError("on purpose")


class Changes(Merging):
    """Does something to the result of each evaluation."""

    def patch(self, model, settings):
        patched = super().patch(model, settings)
        patched.set_model_unet_function_wrapper(
            lambda apply, given: self.evaluated(
                given["input"], lambda: apply(given["input"], given["timestep"], **given["c"])
            )
        )
        return patched

    def evaluated(self, given, evaluate):
        return self.changed(evaluate())


class IsNotFinite(Changes):
    def changed(self, output):
        return output * torch.nan


class Leaks(Changes):
    def __init__(self):
        self.kept = []

    def changed(self, output):
        self.kept.append(output.clone())
        return output


class Remembers(Changes):
    """Adds the number of evaluations so far."""

    count = 0

    def changed(self, output):
        self.count += 1
        return output + self.count


class Swallows(Changes):
    def evaluated(self, given, evaluate):
        try:
            return evaluate()
        except Exception:
            return given


class Overrides(Merging):
    def patch(self, model, settings):
        block = model.model.diffusion_model.double_blocks[0]
        block.forward = type(block).forward.__get__(block)
        return super().patch(model, settings)


class Hooks(Merging):
    def patch(self, model, settings):
        model.model.diffusion_model.double_blocks[0].register_forward_hook(lambda *_: None)
        return super().patch(model, settings)


class Spoils(Merging):
    """Changes a weight for good."""

    def patch(self, model, settings):
        with torch.no_grad():
            model.model.diffusion_model.img_in.weight.mul_(1.01)
        return super().patch(model, settings)


class DoesNotRemove(Merging):
    def remove(self, model):
        return model.clone()

    def remove_patch(self, unet):
        pass


class HasNoPicture(Merging):
    def report(self, model, samples, image, inputs):
        return torch.zeros(3, 3)


class HasAnotherShape(Merging):
    def apply_patch(self, unet, settings):
        self.hook = unet.register_forward_hook(
            lambda _, inputs, output: type(output)(torch.cat([output.sample] * 2))
        )

    def remove_patch(self, unet):
        self.hook.remove()


@pytest.mark.parametrize(
    ("merging", "run", "sentence"),
    [
        (Crashes, RUN, "RuntimeError: on purpose"),
        (IsNotFinite, RUN, "the result is not finite, but the unpatched model's is"),
        (HasAnotherShape, ON_DIFFUSERS, "the result is [2, 4, 12, 16] instead of [1, 4, 12, 16]"),
        (Remembers, STOPPED, "the result after an aborted run is not that of a run by itself"),
        (Remembers, BESIDE, "the result beside another model is not that of a run by itself"),
        (Swallows, STOPPED, "the exception in the middle of the run did not end it"),
        (Overrides, RUN, "flux is not clean: diffusion_model.double_blocks.0"),
        (Hooks, RUN, "flux is not clean: diffusion_model.double_blocks.0"),
        (DoesNotRemove, ON_DIFFUSERS, "diffusers is not clean: "),
        (
            DoesNotRemove,
            replace(RUN, removed=True),
            "merging was removed, and the result is not the unpatched model's",
        ),
        (Spoils, replace(RUN, number=10), "flux, unpatched, has another result than before"),
        (HasNoPicture, replace(RUN, report={"view": "chart"}), "the report is no picture: [3, 3]"),
    ],
)
def test_what_a_faulty_part_does_is_found(judged, merging, run, sentence):
    failures = judged(run, merging()).failures
    assert any(failure.startswith(sentence) for failure in failures), failures


def test_tensors_that_stay_alive_are_counted(judged):
    leaking = Leaks()
    verdict = judged(RUN, leaking)
    assert verdict.leaked == len(leaking.kept) == 2
    assert verdict.failures == [
        "2 tensors stay alive: [2, 16, 12, 16] of torch.float32, [2, 16, 12, 16] of torch.float32"
    ]


def test_an_error_that_is_only_logged_is_a_failure(judged, monkeypatch):
    from tome_nodes.report.counts import Counts

    monkeypatch.setattr(Counts, "merged_anything", property(lambda self: 1 / 0))
    (failure,) = judged(RUN, Merging()).failures
    assert failure.startswith("warned: [ToMe] the report of this run is missing: ZeroDivisionError")


@pytest.mark.parametrize(
    "fault", [*(Fault(kind, 0.9, 1) for kind in FAULTS), Fault(FAULTS[0], None, 1)], ids=str
)
@pytest.mark.parametrize("model", ["flux", "diffusers"])
def test_our_part_stands_a_fault(judged, fault, model):
    verdict = judged(replace(RUN, model=model, fault=fault, number=10), Merging())
    assert verdict == Verdict(merged=True, stopped=True)


@pytest.mark.parametrize("in_thread", [False, True])
def test_our_part_stands_a_second_model(judged, in_thread):
    beside = Beside(in_thread, True, replace(RUN, model="sd3"))
    assert judged(replace(RUN, beside=beside, number=10), Merging()) == Verdict(merged=True)


def test_what_the_host_cannot_do_is_no_failure(judged):
    verdict = judged(replace(RUN, neighbour="NoSuchNode"), Merging())
    assert verdict == Verdict(refused="KeyError: 'NoSuchNode'")


MODELS = {
    "one": Traits(neighbours=("EasyCache",)),
    "other": Traits(patches=80, neighbours=("EasyCache",)),
    "plain": Traits(has_nodes=False),
}


def test_a_draw_depends_on_its_seed_and_number_alone():
    draws = [draw(3, number, MODELS) for number in range(50)]
    assert [draw(3, number, MODELS) for number in reversed(range(50))] == draws[::-1]
    assert draw(4, 0, MODELS) != draws[0]


def test_draws_are_valid_and_cover_every_option_and_every_part():
    draws = [draw(0, number, MODELS) for number in range(1000)]
    for each in draws:
        preset, *_ = each.settings.values()
        given = {name: value for name, value in each.settings.items() if name != "preset"}
        ToMeConfig(**settings_of(preset, given))
        assert each.sampling.size[0] * each.sampling.size[1] <= MODELS[each.model].patches
    drawn = {name: {each.settings.get(name) for each in draws} for name in OPTIONS}
    for name, option in OPTIONS.items():
        assert drawn[name] >= {*option.choices} and len(drawn[name]) > 2, name
    assert {each.settings["preset"] for each in draws} == {*PRESETS, "custom"}
    assert {each.model for each in draws} == {*MODELS}
    for name in ("neighbour", "lora", "replaced", "cloned", "removed", "report", "beside"):
        assert 20 < sum(bool(getattr(each, name)) for each in draws) < 700, name
    assert {each.fault.kind for each in draws if each.fault} == {*FAULTS}


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
    assert made.summary() == f"summary: {line} rss_growth_mb={made.growth:.1f}"
    assert made.is_good == is_good


def test_a_failure_is_told_with_its_settings_and_how_to_repeat_it():
    first, settings, repeat = failure_text(BESIDE, ["it failed"], 7).splitlines()
    assert first == "failed: run 1: it failed"
    assert json.loads(settings.removeprefix("  settings: "))["beside"]["draw"]["model"] == "sd3"
    assert repeat == "  repeat: python3 dev.py soak --seed 7 --only 1"
