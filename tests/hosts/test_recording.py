"""The record of a run: always counts, and details if a report is connected."""

import gc

import comfy.model_management
import numpy as np
import pytest
import torch
from common import BACKEND, relative_error
from host import compiled, merging, sample
from torch._dynamo.testing import CompileCounter

from tome_nodes.comfyui.attachment import attach, is_attached, last_run
from tome_nodes.report.pages import report_of
from tome_nodes.run import log_line, sampling_run
from tome_nodes.run.recording import Recorder
from tome_nodes.settings.config import OPTIONS
from tome_nodes.settings.options import VIEW
from tome_nodes.strategies import make_strategy
from tome_nodes.strategies.bipartite import BipartiteStrategy
from tome_nodes.strategies.plan import Grid


def recorded(model, steps=2, make_strategy=make_strategy, **settings):
    patched = attach(model, merging(**settings), make_strategy, wants_details=lambda: True)
    samples = sample(patched, steps=steps)
    return last_run(patched), samples


def test_without_a_report_only_counts_are_kept(sd15):
    patched = attach(sd15, merging())
    assert is_attached(patched) and not is_attached(sd15)
    assert last_run(patched) is None
    sample(patched, steps=3)
    run = last_run(patched.clone())
    assert run.recording is None
    assert (run.model, run.backend, run.unmerged) == ("SD15", BACKEND, None)
    assert run.counts.merged_blocks == run.counts.blocks_present == 6
    assert len(run.counts.merged_steps) == run.counts.total_steps == 3


def test_the_groups_are_those_of_the_plans(sd15):
    plans = []

    class Kept(BipartiteStrategy):
        def plan(self, features, grid, ratio):
            plans.append(super().plan(features, grid, ratio))
            return plans[-1]

    run, _ = recorded(sd15, make_strategy=Kept)
    assert [*run.recording.slots] == [(0, Grid(12, 16)), (1, Grid(12, 16))]
    # Of six blocks in two steps; one before may have tested the device.
    for slots, plan in zip(run.recording.slots.values(), plans[-12::6], strict=True):
        assert np.array_equal(slots, plan.slots()[0].view(1, 12, 16).cpu().numpy())
    assert run.recording.levels == {1: Grid(12, 16)}


@pytest.mark.parametrize("scope", OPTIONS["scope"].choices)
@pytest.mark.parametrize("strategy", OPTIONS["strategy"].choices)
def test_recording_changes_no_sample(sd15, scope, strategy):
    settings = {"scope": scope, "strategy": strategy}
    run, samples = recorded(sd15, **settings)
    assert torch.equal(samples, sample(attach(sd15, merging(**settings))))
    assert {(b.before, b.after) for b in run.recording.blocks.values()} == {(192, 96)}
    assert len(np.unique(next(iter(run.recording.slots.values())))) == 96


def test_the_record_holds_no_tensor(sd15):
    run, _ = recorded(sd15)
    seen, to_see = set(), [run]
    while to_see:
        thing = to_see.pop()
        assert not isinstance(thing, torch.Tensor)
        if id(thing) not in seen and not isinstance(thing, type):
            seen.add(id(thing))
            to_see += gc.get_referents(thing)
    assert id(run.recording) in seen


@pytest.mark.parametrize("ratios", [(0.5, 0.25), (0.25, 0.5)])
def test_the_least_tokens_of_a_block_over_all_steps_are_recorded(sd15, ratios):
    run, _ = recorded(sd15, steps=3, ratio=ratios[0], ratio_end=ratios[1])
    assert {(b.before, b.after) for b in run.recording.blocks.values()} == {(192, 96)}


def test_times_add_up(sd15_of):
    recording = recorded(sd15_of(2))[0].recording
    assert len(recording.blocks) == 11
    merged = [block for block in recording.blocks.values() if block.after < block.before]
    assert len(merged) == 5
    in_blocks = 2 * sum(block.seconds for block in recording.blocks.values())
    assert 0 < in_blocks < recording.seconds


def test_a_compiled_model_is_recorded_without_times_in_one_graph(shallow, fresh_compiler):
    expected, graphs = sample(attach(shallow, merging())), CompileCounter()
    model = compiled(attach(shallow, merging(), wants_details=lambda: True), backend=graphs)
    assert relative_error(sample(model), expected) < 1e-5
    assert graphs.frame_count == 1
    recording = last_run(model).recording
    assert {block.seconds for block in recording.blocks.values()} == {None}
    assert {(b.before, b.after) for b in recording.blocks.values()} == {(192, 96)}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((None, "on_step"), (Recorder, "note"), (Recorder, "finish")),
        *((log_line, "log_line"), (sampling_run, "make_record")),
    ],
)
def test_an_error_in_what_is_told_of_a_run_loses_no_picture(sd15, monkeypatch, caplog, owner, name):
    def broken(*args, **kwargs):
        raise OSError("the disk is full")

    expected = sample(attach(sd15, merging()))
    if owner is not None:
        monkeypatch.setattr(owner, name, broken)
    on_step = broken if owner is None else None
    patched = attach(sd15, merging(), on_step=on_step, wants_details=lambda: True)
    assert torch.equal(sample(patched), expected)
    ours = [record for record in caplog.records if record.name == "tome_nodes"]
    warnings = [record for record in ours if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "OSError: the disk is full" in warnings[0].getMessage()
    run = last_run(patched)
    if owner is None:
        # The other parts of the report are there.
        assert len(run.counts.merged_steps) == 2
        assert {step for step, _ in run.recording.slots} == {0, 1}
    if name == "note":
        for view in VIEW.choices:
            page = report_of(run, view)
            assert page.text.startswith("Done: merged ") and page.picture.ndim == 3


def test_an_interrupt_passes_through_a_report_and_leaves_no_record(sd15):
    interrupts = []

    def stop(text):
        if interrupts:
            raise interrupts.pop()

    patched = attach(sd15, merging(), on_step=stop)
    sample(patched)
    assert last_run(patched) is not None
    interrupts.append(comfy.model_management.InterruptProcessingException())
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(patched)
    assert last_run(patched) is None


@pytest.mark.parametrize(
    "sigmas", [[0.1, 1.0, 5.0, 14.0], [14.0, 5.0, 1.0, 5.0, 0.0]], ids=["rising", "restarting"]
)
def test_steps_are_in_the_order_of_the_run_wherever_noise_rises(sd15, sigmas):
    steps = []
    model = attach(sd15, merging(), on_step=steps.append)
    sample(model, sigmas=torch.tensor(sigmas))
    total = len(sigmas) - 1
    places = [line.rpartition("step ")[2] for line in steps]
    assert places == [f"{step + 1}/{total}" for step in range(total)]


@pytest.mark.parametrize(
    ("levels", "settings", "line"),
    [
        (1, {"min_tokens": 193}, "all tokens, step 1/1: 192 tokens are fewer than min_tokens=193"),
        (
            2,
            {"max_downsample": 2},
            "11/11 blocks, 192\N{RIGHTWARDS ARROW}96, 48\N{RIGHTWARDS ARROW}24 tokens, step 1/1",
        ),
    ],
)
def test_the_line_of_a_step_says_what_merged_or_why_nothing_did(sd15_of, levels, settings, line):
    lines = []
    sample(attach(sd15_of(levels), merging(**settings), on_step=lines.append), steps=1)
    assert [text.partition(";")[0] for text in lines] == [line]
