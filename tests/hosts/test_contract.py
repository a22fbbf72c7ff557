"""What holds in every host: each test runs for a model of each, or for every model of each."""

import copy
import pickle
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from common import AS_FAST, EVERYTHING, ONLY_KEYS, attributes, relative_error
from models.pipelines import COMPILED, OFFLOADS
from torch._dynamo.testing import CompileCounter
from under_test import (
    COMPILED_UNETS,
    FORECAST,
    LDM,
    MAY_STAY,
    MERGES,
    MERGING,
    ONE_OF_EACH,
    ROUNDING,
    SEVERAL,
    SKIPPING,
    SKIPS,
    STEPS,
    ComfyUI,
    both_ways,
    in_each,
    numbers,
    of,
    param,
    steps_for,
)

from tome_nodes import reasons
from tome_nodes.settings.config import OPTIONS
from tome_nodes.skipping import forecasts
from tome_nodes.skipping.course import course_of
from tome_nodes.skipping.steps import ForecastStep, log_snr


def started(host, options):
    """The latent of a run: the host may keep something of its own of the first."""
    host(steps_for(options))
    return host(steps_for(options))


def check_undone(host, options, steps):
    """A patched run is another, and the same each time; then all is as it was."""

    def run():
        torch.manual_seed(0)
        return host(steps), torch.get_rng_state()

    # As above.
    run()
    (plain, random), before = run(), attributes(host.network)
    host.patch(**options)
    (patched, random_after), (again, _) = run(), run()
    assert patched.isfinite().all() and 1e-4 < relative_error(patched, plain) < 1
    assert torch.equal(again, patched)
    assert torch.equal(random_after, random)
    host.undo()
    assert attributes(host.network) == before
    assert torch.equal(run()[0], plain)


@of(MERGING)
def test_every_model_merges_and_is_as_before_without(host, log_messages):
    check_undone(host, MERGES, 2)
    plain = host()
    host.patch(lossless=True, **EVERYTHING)
    assert relative_error(host(), plain) < ROUNDING
    assert log_messages()[-1].startswith(f"[ToMe] merged {host.blocks}/{host.blocks} blocks ")


@of(SKIPPING)
def test_every_model_skips_the_steps_that_the_line_says_and_is_as_before_without(
    host, log_messages
):
    check_undone(host, SKIPS, STEPS)
    assert host.skipped(STEPS)[0] == set()
    host.patch(**SKIPS)
    skipped, _ = host.skipped(STEPS)
    words = f"{len(skipped)}/{STEPS} steps"
    if host.is_unet:
        line = f"[ToMe] shallow {words}"
    else:
        line = f"[ToMe] forecast {words} ({', '.join(str(step + 1) for step in sorted(skipped))})"
    assert skipped and log_messages()[-1].startswith(line)


@of(SEVERAL)
@pytest.mark.parametrize(
    "options",
    [{"attn_tokens": "q,k,v"}, {"attn_tokens": "k,v"}, ONLY_KEYS, {"scope": "stack"}, AS_FAST],
    ids=["q,k,v", "k,v", "keys", "stack", "fast"],
)
def test_a_lossless_plan_reproduces_the_model_in_every_scope(host, options, log_messages):
    expected = host()
    host.patch(lossless=True, **EVERYTHING, **options)
    assert relative_error(host(), expected) < ROUNDING
    assert log_messages()[-1].startswith(f"[ToMe] merged {host.blocks}/{host.blocks} blocks ")


def first_block(host):
    """The first transformer block of a UNet."""
    return next(each for each in host.network.modules() if hasattr(each, "attn1"))


@of([param("ComfyUI sd15"), param("diffusers sd15"), *LDM])
def test_stacks_change_all_tokens_of_a_slot_alike(host):
    """So every token keeps its difference from the others."""
    host.patch(**MERGES, scope="stack")
    changes = []
    with first_block(host).register_forward_hook(
        lambda _, given, answer: changes.append(answer[0] - given[0][0])
    ):
        host(1)
    (change,) = changes
    alike = torch.cdist(change.double(), change.double()) < 1e-3
    assert len(alike.unique(dim=0)) == len(change) // 2


@of([*COMPILED_UNETS, *LDM])
@pytest.mark.parametrize("part", ["layer", "forward"])
def test_what_other_code_changes_between_runs_is_merged_as_it_is(host, part):
    host.patch(**MERGES, merge_mlp=True)
    before, block = host(), first_block(host)
    layer, forward = block.ff, block.forward
    if part == "layer":
        block.ff = torch.nn.Sequential(layer, torch.nn.Tanh())
    else:
        block.forward = lambda *args, **kwargs: 0.9 * forward(*args, **kwargs)
    try:
        changed = host()
        host.undo()
        plain = host()
        host.patch(**MERGES, merge_mlp=True)
        assert torch.equal(host(), changed)
        assert not torch.equal(changed, before) and not torch.equal(changed, plain)
    finally:
        block.ff = layer
        vars(block).pop("forward", None)
    assert torch.equal(host(), before)


@in_each
@both_ways
def test_patching_again_replaces_the_settings_and_a_ratio_of_0_removes_them(
    host, options, log_messages
):
    steps = steps_for(options)
    plain, before = started(host, options), attributes(host.network)
    host.patch(**options)
    once = host(steps)
    host.patch(**options | {"ratio": 0.9})
    assert not torch.equal(host(steps), once)
    host.patch(**options)
    assert torch.equal(host(steps), once)
    lines = log_messages()
    host.patch(**options | {"ratio": 0.0})
    assert attributes(host.network) == before
    assert torch.equal(host(steps), plain)
    assert log_messages() == lines


@in_each
def test_a_ratio_of_0_skips_nothing_whatever_its_end(host):
    host.patch(ratio=0.0, ratio_end=0.4, forecast=True)
    assert host.skipped(STEPS)[0] == set()


IN_HALF = [
    *({**MERGES, "strategy": strategy} for strategy in OPTIONS["strategy"].choices),
    SKIPS,
]
DTYPES = cycle((torch.float16, torch.bfloat16))


@pytest.mark.newest_only
@in_each
@pytest.mark.parametrize(("options", "dtype"), [*zip(IN_HALF, DTYPES, strict=False)], ids=str)
def test_half_precision_does_as_much_to_a_like_result(host, options, dtype, log_messages):
    host.needs("half precision by itself")
    results = []
    for each in host, host.half(dtype):
        each.patch(**options)
        results.append(each(steps_for(options)))
    assert results[1].isfinite().all()
    assert 0 < relative_error(results[1].float(), results[0]) < 0.5
    line, of_half = log_messages()
    assert of_half == line


STACKS = {**MERGES, "scope": "stack", "strategy": "window"}
MODULES = {**MERGES, "merge_crossattn": True, "merge_mlp": True}


@pytest.mark.newest_only
@pytest.mark.parametrize(
    ("host", "options", "way"),
    [
        param("ComfyUI one_level", MODULES | {"strategy": "window"}, "before"),
        *(
            param("ComfyUI one_level", STACKS | {"strategy": strategy}, "before")
            for strategy in OPTIONS["strategy"].choices
            if strategy != "window"
        ),
        param("ComfyUI flux", MERGES, "before"),
        *(param(f"diffusers {kind}", STACKS, way) for way, kind in COMPILED.items()),
        param("diffusers one_block", MODULES, "before"),
        *(param("diffusers flux", SKIPS, way) for way in ("after", "compile_repeated_blocks")),
        param("diffusers one_block", SKIPS, "before"),
        param("diffusers one_level", SKIPS, "compile_repeated_blocks"),
    ],
    indirect=["host"],
    ids=str,
)
def test_torch_compile_makes_whole_graphs_once(host, options, way, fresh_compiler):
    """They serve each time that a model is patched, in all steps."""

    def run():
        return host(steps_for(options), size=(16, 16))

    graphs, plain = CompileCounter(), run()
    host.patch(**options)
    expected = run()
    assert relative_error(expected, plain) > 1e-3
    if way == "before":
        host.undo()
    host.compile(graphs, way=way)
    if way == "before":
        assert relative_error(run(), plain) < 2 * ROUNDING
    counts = []
    # There may be more blocks than graphs of one code.
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            host.patch(**options)
            assert relative_error(run(), expected) < 2 * ROUNDING
            counts.append(graphs.frame_count)
    assert counts[0] == counts[1] > 0
    host.undo()
    assert relative_error(run(), plain) < 2 * ROUNDING


OF_PYTORCH = [param("diffusers sd15"), param("diffusers flux"), *LDM]
"""Models that are patched in place; ComfyUI copies and offloads its models by itself."""


@of(OF_PYTORCH)
@both_ways
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_does_the_same_in_its_own_weights(host, options, copied):
    steps = steps_for(options)
    host.patch(**options)
    expected = host(steps)
    other = copied(host)
    assert torch.equal(other(steps), expected)
    for parameter in host.network.parameters():
        parameter.data.zero_()
    assert torch.equal(other(steps), expected)
    other.undo()
    assert not torch.equal(other(steps), expected)


@of(OF_PYTORCH[:2])
@pytest.mark.parametrize("is_first", [True, False], ids=["offload first", "patch first"])
@pytest.mark.parametrize("way", OFFLOADS)
def test_offloading(host, way, is_first):
    options = {**MERGES, "forecast": True} if host.is_unet else SKIPS
    plain = host(STEPS)
    host.patch(**options)
    expected = host(STEPS)
    if is_first:
        host.undo()
    for part in host.network, getattr(host.model, "vae", None):
        if part is not None:
            OFFLOADS[way](part)
    if is_first:
        host.patch(**options)
    if way == "sequential":
        assert {parameter.device.type for parameter in host.network.parameters()} == {"meta"}
    assert relative_error(host(STEPS), expected) < ROUNDING
    host.undo()
    assert relative_error(host(STEPS), plain) < ROUNDING < relative_error(expected, plain)


@in_each
@both_ways
def test_nothing_is_kept_of_a_run(host, options):
    started(host, options)
    before = numbers()
    host.patch(**options)
    host(steps_for(options))
    assert numbers() < before + MAY_STAY


@in_each
def test_a_run_that_is_too_short_is_the_plain_one_and_says_so(host, log_messages):
    steps = 4 if host.is_unet else 3
    plain = host(steps)
    host.patch(**SKIPS)
    assert torch.equal(host(steps), plain)
    too_short = reasons.too_short_for_shallow if host.is_unet else reasons.too_short
    why = too_short(steps, steps + 1)
    assert why.why in log_messages()[-1]


@in_each
def test_steps_are_skipped_between_the_percents(host):
    host.patch(**SKIPS, end_percent=0.5)
    early, _ = host.skipped(12)
    host.patch(**SKIPS, start_percent=0.5)
    late, _ = host.skipped(12)
    assert early and late
    # Hosts differ in the share at which a step is.
    assert max(early) <= 6 <= min(late) + 1


@in_each
@both_ways
def test_percents_that_cover_no_step_leave_the_plain_run(host, options, log_messages):
    plain = started(host, options)
    host.patch(**options, start_percent=1.0)
    assert torch.equal(host(steps_for(options)), plain)
    # What only merges is reported by call in other hosts.
    if options is SKIPS or isinstance(host, ComfyUI):
        why = "start_percent=1.0 to end_percent=1.0 covers no step of this run"
        assert why in log_messages()[-1]


@of([*ONE_OF_EACH, param("diffusers wan"), param("diffusers sd3")])
def test_the_step_after_something_else_changed_the_latent_is_whole(host):
    host.needs("change of a latent between steps")
    host.patch(**SKIPS)
    usual, _ = host.skipped(STEPS)
    at = min(usual)

    def change(step, latent):
        return latent.flip(-1) if step == at - 1 else None

    left, latent = host.skipped(STEPS, after_step=change)
    assert latent.isfinite().all()
    # The answers of a transformer lead to other forecasts.
    assert left == usual - {at} if host.is_unet else at not in left


def first_forecast(steps):
    return next(index for index, step in enumerate(steps) if step.answer is None)


def places(*steps):
    """Where steps are in their run, as far as it decides how answers go on."""
    return [ForecastStep(0, STEPS, log_snr(step.level, is_flow=True)) for step in steps]


@of(FORECAST)
def test_a_step_is_forecast_on_the_course_of_the_answers_before(host):
    host.patch(**SKIPS)
    steps = host.traced(STEPS)
    at = first_forecast(steps)
    one, other, now = steps[at - 2 : at + 1]
    first, last, here = places(one, other, now)
    # Answers that hardly change go on along a line, in pictures, too.
    courses = {course_of(here, now.latent, is_settled) for is_settled in (False, True)}
    change = other.used - one.used
    expected = [other.used + each.shares(first, last, here).of(change) for each in courses]
    assert min(relative_error(now.used, each) for each in expected) < 1e-4


@of(
    [param(f"ComfyUI {kind}") for kind in ("flux", "wan21", "ltxav")]
    + [param(f"diffusers {kind}") for kind in ("flux", "sd3", "ltx")]
)
def test_the_step_after_a_forecast_makes_up_for_its_error(host, monkeypatch):
    """In the arithmetic of the sampler, on the way between the answers around the forecast."""

    def unanswered(*given):
        return replace(course_of(*given), response=0.0)

    monkeypatch.setattr(forecasts, "course_of", unanswered)
    host.patch(**SKIPS)
    steps = host.traced(STEPS, is_guided=False)
    at = first_forecast(steps)
    before, now, after, then = steps[at - 1 : at + 3]
    is_settled = relative_error(steps[0].used, steps[1].used) < 0.15
    course = course_of(*places(now), now.latent, is_settled)
    place = course.place(*places(before, now, after))
    between = torch.lerp(before.answer, after.answer, place)
    on_line = torch.lerp(between, now.latent, after.level / now.level)
    expected, uncorrected = (
        torch.lerp(after.answer, latent, then.level / after.level)
        for latent in (on_line, after.latent)
    )
    error = relative_error(then.latent, expected)
    assert error < 1e-3 and 3 * error < relative_error(then.latent, uncorrected)
    # No step comes after the last.
    assert relative_error(steps[-1].used, steps[-1].answer) < 1e-5
