"""An error at any stage of merging: it is the one that the user sees, and it leaves nothing."""

from itertools import cycle
from weakref import WeakSet

import comfy.model_management
import pytest
import torch
from common import EVERYTHING, relative_error, stopped
from host import compiled, merging, overridden, sample
from models.comfyui import TINY, UNETS
from models.comfyui import sample as sample_transformer
from models.pipelines import call, make_unet
from torch._dynamo.testing import CompileCounter

import tome_nodes
from tome_nodes import reasons
from tome_nodes.comfyui.attachment import attach
from tome_nodes.merging import model_run
from tome_nodes.merging.block import Block
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

CASES = [(scope, stage) for scope, stages in NEEDED.items() for stage in stages]

ROUNDING = 5e-5

by_scope = pytest.mark.parametrize("scope", NEEDED)
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


@pytest.fixture
def without_memory(break_stage, log_messages):
    """Check that a run is the plain one if a stage has no memory, and the next as ever."""

    def check(stage, run, plain):
        expected = run()
        before = len(log_messages())
        calls = break_stage(stage, torch.OutOfMemoryError("no room"))
        assert torch.equal(run(), plain)
        assert len(calls) == 1
        assert log_messages()[before:] == [
            f"[ToMe] {reasons.NO_MEMORY}; the rest of this run goes on without merging",
            f"[ToMe] nothing merged: {reasons.NO_MEMORY}",
        ]
        assert torch.equal(run(), expected)

    return check


def settings(scope):
    return merging(**EVERYTHING, scope=scope)


@pytest.mark.parametrize(
    ("scope", "stage", "kind"),
    [(*case, kind) for case, kind in zip(CASES, cycle(ERRORS), strict=False)],
)
def test_the_first_error_is_raised_and_the_next_run_is_as_ever(
    sd15, break_stage, scope, stage, kind
):
    patched = attach(sd15, settings(scope))
    plain, expected = sample(sd15), sample(patched)
    break_stage(stage, kind("no luck today"))
    with pytest.raises(kind, match="no luck today"):
        sample(patched)
    assert overridden(sd15) == []
    assert torch.equal(sample(patched), expected)
    assert torch.equal(sample(sd15), plain)


@pytest.mark.parametrize(("scope", "stage"), CASES)
def test_without_memory_for_merging_a_run_goes_on_unmerged(sd15, without_memory, scope, stage):
    patched = attach(sd15, settings(scope))
    without_memory(stage, lambda: sample(patched), plain=sample(sd15))
    assert overridden(sd15) == []


@by_scope
def test_what_merged_before_memory_ran_out_is_kept(sd15, log_messages, break_stage, scope):
    stage = "merge" if scope == "module" else "merge of blocks"
    patched = attach(sd15, settings(scope))
    plain, expected = sample(sd15, steps=4), sample(patched, steps=4)
    counted = break_stage(stage, None, call=0)
    sample(patched, steps=4)
    break_stage(stage, torch.OutOfMemoryError("no room"), call=len(counted) // 2 + 2)
    actual = sample(patched, steps=4)
    assert not torch.equal(actual, plain)
    assert not torch.equal(actual, expected)
    assert actual.isfinite().all()
    assert log_messages()[-1].startswith("[ToMe] merged ")


@by_scope
def test_without_memory_of_its_own_the_model_fails_as_ever(sd15, scope):
    patched = attach(sd15, settings(scope))
    expected = sample(patched)
    with stopped(sd15.model.diffusion_model.middle_block[1], torch.OutOfMemoryError):
        sample(patched)
    assert overridden(sd15) == []
    assert torch.equal(sample(patched), expected)


@pytest.mark.parametrize("stage", ["plan", "merge", "weights"])
def test_a_transformer_goes_on_unmerged(models, without_memory, stage):
    tiny, model = TINY["flux"], models("flux")
    patched = attach(model, merging(strategy="window"))
    without_memory(
        stage, lambda: sample_transformer(patched, tiny), plain=sample_transformer(model, tiny)
    )
    assert overridden(model) == []


@pytest.mark.parametrize(("scope", "stage"), [("module", "merge"), ("stack", "weights")])
def test_a_unet_of_diffusers_goes_on_unmerged(without_memory, scope, stage):
    unet = make_unet()

    def run():
        return torch.stack([call(unet, timestep) for timestep in (900, 600)])

    plain = run()
    tome_nodes.apply_patch(unet, scope=scope, proportional_attn=True, **EVERYTHING)
    without_memory(stage, run, plain)
    tome_nodes.remove_patch(unet)
    assert not any("forward" in vars(module) for module in unet.modules())


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_unet_whose_compiler_makes_no_more_graphs_merges_uncompiled_and_says_so_once(
    fresh_compiler, log_messages, fullgraph
):
    unet, graphs = make_unet("one_block"), CompileCounter()
    tome_nodes.apply_patch(unet)
    sizes = (16, 16), (16, 20), (24, 24)
    expected = [call(unet, grid=size) for size in sizes]
    compiled_unet = torch.compile(unet, backend=graphs, fullgraph=fullgraph)
    with torch._dynamo.config.patch(recompile_limit=1):
        for timestep in 500, 400, 500:
            for size, output in zip(sizes, expected, strict=True):
                actual = call(compiled_unet, timestep, grid=size)
                assert timestep != 500 or relative_error(actual, output) < ROUNDING
    assert graphs.frame_count == 1
    assert [line for line in log_messages() if "compile" in line] == [
        f"[ToMe] {reasons.NO_MORE_GRAPHS}"
    ]


def test_a_model_whose_compiler_makes_no_more_graphs_merges_uncompiled_and_says_so_once(
    shallow, fresh_compiler, monkeypatch, log_messages
):
    # The model is that of other tests.
    monkeypatch.setattr(model_run, "_said", WeakSet())
    graphs, patched = CompileCounter(), attach(shallow, merging())
    sizes = (16, 16), (16, 20), (24, 24)
    expected = [sample(patched, size) for size in sizes]
    merged = compiled(patched, backend=graphs)
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            for size, output in zip(sizes, expected, strict=True):
                assert relative_error(sample(merged, size), output) < ROUNDING
    assert graphs.frame_count == 1
    assert [line for line in log_messages() if "compile" in line] == [
        f"[ToMe] {reasons.NO_MORE_GRAPHS}"
    ]


def fails_on_merging(graph, inputs):
    """A compiler's backend that lacks an operator with which tokens merge."""
    operators = {str(node.target) for node in graph.graph.nodes}
    if any("embedding_bag" in operator for operator in operators):
        raise NotImplementedError("there is no bag\nin this compiler")
    return graph.forward


def where_a_compiler_fails(run, remove, log_messages):
    """Check that merging ends where the compiler fails on it, and that a run says so once."""
    merged, attempts = run(), log_messages()
    assert len(attempts) == 2
    why = (
        "torch.compile failed on merging (NotImplementedError: there is no bag); do not compile "
        "this model, or leave ToMe out"
    )
    assert attempts[0] == f"[ToMe] {why}; the rest of this run goes on without merging"
    assert attempts[1] == f"[ToMe] nothing merged: {why}"
    remove()
    assert torch.equal(merged, run())


def test_where_the_compiler_fails_on_merging_a_run_goes_on_unmerged(
    shallow, fresh_compiler, log_messages
):
    model = compiled(shallow.clone(), backend=fails_on_merging)
    patched = [attach(model, merging())]
    tiny = UNETS["sd15"]
    where_a_compiler_fails(
        lambda: sample_transformer(patched[0], tiny, steps=2),
        lambda: patched.insert(0, model),
        log_messages,
    )
    assert overridden(model) == []


def test_where_the_compiler_fails_a_unet_of_diffusers_goes_on_unmerged(
    fresh_compiler, log_messages
):
    unet = make_unet("one_block")
    compiled_unet = torch.compile(unet, backend=fails_on_merging, fullgraph=True)
    tome_nodes.apply_patch(unet, scope="stack")
    where_a_compiler_fails(
        lambda: torch.stack([call(compiled_unet, timestep) for timestep in (900, 600)]),
        lambda: tome_nodes.remove_patch(unet),
        log_messages,
    )
    assert not any("forward" in vars(module) for module in unet.modules())
