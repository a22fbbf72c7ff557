"""What holds in every host of errors: it is the one that the user sees, and it leaves nothing."""

from itertools import cycle
from threading import Thread
from weakref import WeakSet

import comfy.model_management
import pytest
import torch
from common import EVERYTHING, attributes, relative_error, stopped
from torch._dynamo.testing import CompileCounter
from under_test import (
    COMPILED_UNETS,
    MAY_STAY,
    MERGES,
    ROUNDING,
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
from tome_nodes.merging import model_run
from tome_nodes.merging.block import Block
from tome_nodes.run import record
from tome_nodes.skipping.features import Features
from tome_nodes.strategies.cells import CellStrategy
from tome_nodes.strategies.plan import Plan

STAGES = {
    "plan": (CellStrategy, "cells_of"),
    "merge": (Plan, "merge_keys"),
    "merge of blocks": (Plan, "merge"),
    "weights": (Block, "weights"),
    "unmerge": (Plan, "unmerge"),
    "unmerge of blocks": (Plan, "add_change"),
}

NEEDED = {
    "module": ("plan", "merge", "weights", "unmerge"),
    "stack": ("plan", "merge of blocks", "weights", "unmerge of blocks"),
}

ERRORS = [RuntimeError, comfy.model_management.InterruptProcessingException, KeyboardInterrupt]


@pytest.fixture
def break_stage(monkeypatch):
    """Have the n-th call of a stage raise an error."""

    def broken(stage, error, call=1):
        target, name = STAGES[stage]
        works, calls = getattr(target, name), []

        def fails(*args, **kwargs):
            calls.append(None)
            if len(calls) == call:
                raise error
            return works(*args, **kwargs)

        monkeypatch.setattr(target, name, fails)
        return calls

    return broken


def merging(scope):
    return {**EVERYTHING, "ratio": 0.5, "scope": scope, "proportional_attn": True}


# All stages in one host, as they are the same in all, and some in the others.
IN_HOSTS = [
    *(("ComfyUI sd15", scope, stage) for scope, stages in NEEDED.items() for stage in stages),
    *(("ComfyUI flux", "module", stage) for stage in ("plan", "merge", "weights")),
    *((unet, "module", "merge") for unet in ("diffusers sd15", "ldm sd2")),
    *((unet, "stack", "weights") for unet in ("diffusers sd15", "ldm sd2")),
]


@pytest.mark.parametrize(
    ("host", "scope", "stage", "kind"),
    [param(*case, kind) for case, kind in zip(IN_HOSTS, cycle(ERRORS), strict=False)],
    indirect=["host"],
)
def test_the_first_error_is_raised_and_the_next_run_is_as_ever(
    host, break_stage, scope, stage, kind
):
    plain = host()
    host.patch(**merging(scope))
    expected, patched = host(), attributes(host.network)
    break_stage(stage, kind("no luck today"))
    with pytest.raises(kind, match="no luck today"):
        host()
    assert attributes(host.network) == patched
    assert torch.equal(host(), expected)
    host.undo()
    assert torch.equal(host(), plain)


@pytest.mark.parametrize(
    ("host", "scope", "stage"), [param(*case) for case in IN_HOSTS], indirect=["host"]
)
def test_without_memory_for_merging_a_run_goes_on_unmerged(
    host, break_stage, log_messages, scope, stage
):
    plain = host()
    host.patch(**merging(scope))
    expected, patched = host(), attributes(host.network)
    before = len(log_messages())
    calls = break_stage(stage, torch.OutOfMemoryError("no room"))
    assert torch.equal(host(), plain)
    assert len(calls) == 1
    assert log_messages()[before:] == [
        f"[ToMe] {reasons.NO_MEMORY}; the rest of this run goes on without merging",
        f"[ToMe] nothing merged: {reasons.NO_MEMORY}",
    ]
    assert attributes(host.network) == patched
    assert torch.equal(host(), expected)


@in_each
def test_what_merged_before_memory_ran_out_is_kept(host, log_messages, break_stage):
    scope, stage = ("stack", "merge of blocks") if host.is_unet else ("module", "merge")
    plain = host(4)
    host.patch(**merging(scope))
    expected = host(4)
    counted = break_stage(stage, None, call=0)
    host(4)
    break_stage(stage, torch.OutOfMemoryError("no room"), call=len(counted) // 2 + 2)
    actual = host(4)
    assert actual.isfinite().all()
    assert not torch.equal(actual, plain)
    assert not torch.equal(actual, expected)
    if isinstance(host, ComfyUI):
        # The others say it of each size once.
        assert log_messages()[-1].startswith("[ToMe] merged ")


@in_each
@pytest.mark.parametrize("scope", NEEDED)
def test_without_memory_of_its_own_the_model_fails_as_ever(host, scope):
    host()
    host.patch(**merging(scope))
    expected, patched = host(), attributes(host.network)
    with stopped(host.deep[0], torch.OutOfMemoryError):
        host()
    assert attributes(host.network) == patched
    assert torch.equal(host(), expected)


def in_another_thread(call):
    """What a call returns there. The test fails if it waits for ever."""
    results = []
    thread = Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(timeout=60)
    (result,) = results
    return result


@in_each
@both_ways
@pytest.mark.parametrize(
    ("place", "error"), [*zip(("within", "at the end", "between steps"), ERRORS, strict=True)]
)
def test_a_run_that_is_stopped_leaves_nothing_and_blocks_no_other(host, options, place, error):
    steps = steps_for(options)
    host(steps)
    plain, before = host(steps), attributes(host.network)
    host.patch(**options)
    skipped, expected = host.skipped(steps)
    patched, calls = attributes(host.network), []
    # To count takes long. Nothing tells that a run has ended between two calls.
    known = numbers() if options is SKIPS and place == "at the end" else None
    # The first that is shallow or, where none is, the third.
    at = min(skipped, default=2)

    def between(step, latent):
        if step == at:
            raise error("on purpose")

    def fail(*_):
        calls.append(None)
        if len(calls) == at + 1:
            raise error("on purpose")

    if place == "within":
        with stopped(host.deep[0], error):
            host(steps)
    elif place == "at the end":
        with host.network.register_forward_hook(fail), pytest.raises(error, match="on purpose"):
            host(steps)
    else:
        with pytest.raises(error, match="on purpose"):
            host(steps, after_step=between)
    assert attributes(host.network) == patched
    assert known is None or numbers() < known + MAY_STAY
    assert torch.equal(in_another_thread(lambda: host(steps)), expected)
    assert torch.equal(host(steps), expected)
    host.undo()
    assert attributes(host.network) == before
    assert torch.equal(host(steps), plain)


def goes_on_whole(host, log_messages):
    """The steps of a run that are shallow, and what it says of the rest, once."""
    before = len(log_messages())
    shallow, latent = host.skipped(STEPS)
    assert latent.isfinite().all()
    end = "; the rest of this run goes on without shallow steps"
    (said,) = [line for line in log_messages()[before:] if line.endswith(end)]
    return shallow, said.removesuffix(end)


def stopped_shallow_steps(host):
    """The latent and the steps of a run with shallow steps."""
    host.needs("shallow steps")
    host.patch(**SKIPS)
    return host.skipped(STEPS)


@in_each
def test_without_memory_for_features_a_run_goes_on_whole(host, monkeypatch, log_messages):
    shallow, expected = stopped_shallow_steps(host)

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    calls = []
    count = host.network.register_forward_hook(lambda *_: calls.append(None))
    with monkeypatch.context() as patch, count:
        patch.setattr(Features, "keep", full)
        assert goes_on_whole(host, log_messages) == (set(), f"[ToMe] {reasons.NO_MEMORY}")
    # The answer is there, so the model does not run again.
    assert len(calls) == STEPS
    assert host.skipped(STEPS)[0] == shallow
    assert torch.equal(host(STEPS), expected)


@in_each
def test_without_memory_in_a_shallow_step_a_run_goes_on_whole(host, log_messages):
    shallow, expected = stopped_shallow_steps(host)
    second, calls = sorted(shallow)[1], []

    def full(*_):
        calls.append(None)
        if len(calls) == second + 1:
            raise torch.OutOfMemoryError("no room")

    with host.network.register_forward_hook(full):
        left, said = goes_on_whole(host, log_messages)
    assert (left, said) == ({min(shallow)}, f"[ToMe] {reasons.NO_MEMORY}")
    assert torch.equal(host(STEPS), expected)


@in_each
@pytest.mark.parametrize("evaluation", [1, 2])
def test_where_memory_is_short_features_go_before_merging(
    host, break_stage, log_messages, evaluation
):
    """There are none in the first evaluation, so merging stops, and steps are shallow."""
    host.needs("shallow steps")
    options = merging("module")
    host.patch(**options)
    counted = break_stage("merge", None, call=0)
    merged = host(STEPS)
    host.patch(**options, forecast=True)
    shallow, _ = host.skipped(STEPS)
    before = len(log_messages())
    call = (evaluation - 1) * len(counted) // STEPS + 1
    break_stage("merge", torch.OutOfMemoryError("no room"), call)
    left, latent = host.skipped(STEPS)
    gone = "merging" if evaluation == 1 else "shallow steps"
    said = f"[ToMe] {reasons.NO_MEMORY}; the rest of this run goes on without"
    assert [line for line in log_messages()[before:] if line.startswith(said)] == [f"{said} {gone}"]
    assert left == (shallow if evaluation == 1 else set())
    assert torch.equal(latent, merged) == (evaluation == 2)


@in_each
def test_a_hook_on_a_part_that_is_left_out_makes_the_rest_whole(host, log_messages):
    _, expected = stopped_shallow_steps(host)
    with host.left_out.register_forward_hook(
        lambda _, __, h: h + torch.ones(h.shape[1] or 64, 1, 1)
    ):
        shallow, said = goes_on_whole(host, log_messages)
    assert shallow == set()
    assert said.startswith("[ToMe] a shallow step failed (RuntimeError: ")
    assert torch.equal(host(STEPS), expected)


@in_each
@both_ways
def test_an_error_in_the_report_costs_no_picture(host, options, monkeypatch, log_messages):
    host.patch(**options)
    expected = host(steps_for(options))
    host.undo()
    host.patch(**options)

    def broken(*args, **kwargs):
        raise ValueError("no ink")

    monkeypatch.setattr(record, "gain_of", broken)
    assert torch.equal(host(steps_for(options)), expected)
    assert log_messages()[-1] == "[ToMe] the report of this run is missing: ValueError: no ink"


@of(COMPILED_UNETS)
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_model_whose_compiler_makes_no_more_graphs_merges_uncompiled_and_says_so_once(
    host, is_whole, fresh_compiler, monkeypatch, log_messages
):
    # ComfyUI's models are those of other tests.
    monkeypatch.setattr(model_run, "_said", WeakSet())
    graphs, sizes = CompileCounter(), ((16, 16), (16, 20), (24, 24))
    host.patch(**MERGES)
    expected = [host(size=size) for size in sizes]
    host.undo()
    host.compile(graphs, is_whole)
    host.patch(**MERGES)
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            for size, output in zip(sizes, expected, strict=True):
                assert relative_error(host(size=size), output) < ROUNDING
    assert graphs.frame_count == 1
    said = [line for line in log_messages() if "compile" in line]
    assert said == [f"[ToMe] {reasons.NO_MORE_GRAPHS}"]


def fails_on_merging(graph, inputs):
    """A compiler's backend that lacks an operator with which tokens merge."""
    operators = {str(node.target) for node in graph.graph.nodes}
    if any("embedding_bag" in operator for operator in operators):
        raise NotImplementedError("there is no bag\nin this compiler")
    return graph.forward


@of(COMPILED_UNETS)
def test_where_the_compiler_fails_on_merging_a_run_goes_on_unmerged(
    host, fresh_compiler, log_messages
):
    # ComfyUI marks the layers of a model that it runs for the first time.
    host()
    host.compile(fails_on_merging)
    host.patch(**MERGES)
    patched = attributes(host.network)
    actual = host()
    why = (
        "torch.compile failed on merging (NotImplementedError: there is no bag); do not compile "
        "this model, or leave ToMe out"
    )
    assert log_messages() == [
        f"[ToMe] {why}; the rest of this run goes on without merging",
        f"[ToMe] nothing merged: {why}",
    ]
    assert attributes(host.network) == patched
    host.undo()
    assert torch.equal(actual, host())
