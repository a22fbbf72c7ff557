"""Ways to do the same, tried once, with a clock that the tests set."""

from dataclasses import replace
from statistics import median

import pytest
import torch
from common import DEVICE, FakeClock
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tome_nodes.merging.layout import Grid
from tome_nodes.merging.plan import SlotPlan
from tome_nodes.ops import TORCH, autotune
from tome_nodes.ops.autotune import Autotune, Choice, Tuner, case_of, fastest, tuned
from tome_nodes.patching import engine
from tome_nodes.patching.engine import make_engine
from tome_nodes.report import log_line
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy

GPU = torch.device("cuda", 0)


class Clock(FakeClock):
    """Goes on by what each way says that it takes."""

    def taking(self, *seconds, does=lambda *_: None):
        """A way that takes these times, one after the other, and the last from then on.

        In place of a time, it may have an error to raise.
        """
        left = [*seconds]

        def way(*arguments):
            way.calls += 1
            now = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(now, BaseException):
                raise now
            self.time += now
            return does(*arguments)

        way.calls = 0
        return way


class Memory(dict):
    """A store that is gone with the test."""

    def read(self, device, case, default):
        return self.get((device, case, default))

    def keep(self, device, case, choice):
        self[device, case, choice.default] = choice


class Probe(Autotune):
    """With a clock and a memory of its own."""

    def __init__(self):
        self.clock, self.memory = Clock(), Memory()
        super().__init__(self.memory, lambda device: self.clock)

    def chosen(self, ways, *size):
        """The choice among ways to weigh keys of a size."""
        return self.choose(GPU, ("weights", *size), "mask", lambda: ways)

    def ways(self, **times):
        """Ways that take these times, by name."""
        return {name: self.clock.taking(time) for name, time in times.items()}


@pytest.fixture
def idle(monkeypatch):
    """No graph is captured; there is no GPU that could be asked."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


SECONDS = st.floats(1e-6, 1e-3)


@given(st.lists(st.lists(SECONDS, min_size=9, max_size=9), min_size=2, max_size=4))
def test_the_fastest_is_taken_if_it_is_a_tenth_faster_than_the_default(times):
    clock = Clock()
    # The first call, which compiles, and two more do not count.
    ways = {str(index): clock.taking(1.0, *each) for index, each in enumerate(times)}
    found = fastest("0", ways, clock)
    medians = [median(each[2:]) for each in times]
    assert found.seconds == pytest.approx({name: medians[int(name)] for name in ways}, rel=1e-6)
    assert {way.calls for way in ways.values()} == {10}
    best = min(medians)
    if medians[0] > 1.1001 * best:
        assert medians[int(found.variant)] == pytest.approx(best, rel=1e-6)
    if medians[0] < 1.0999 * best:
        assert found.variant == "0"


@pytest.mark.parametrize(
    ("mask", "kernel", "calls"),
    [
        # To compile, and once to count.
        (2.0, 1.0, 2),
        (0.2, 0.1, 6),
    ],
)
def test_long_ways_run_less_often(mask, kernel, calls):
    clock = Clock()
    ways = {"mask": clock.taking(mask), "kernel": clock.taking(kernel)}
    assert fastest("mask", ways, clock).variant == "kernel"
    assert [way.calls for way in ways.values()] == [calls, calls]


def test_a_way_that_fails_is_left_out():
    clock, error = Clock(), torch.OutOfMemoryError("no room")
    fails, slow, quick = clock.taking(error), clock.taking(2e-3), clock.taking(1e-3)
    found = fastest("a", {"a": fails, "b": slow, "c": quick}, clock)
    assert (found.variant, found.seconds.keys()) == ("c", {"b", "c"})
    assert fastest("a", {"a": slow, "b": fails}, clock) == Choice("a", "a", {})
    assert fastest("a", {"a": fails, "b": slow}, clock) == Choice("b", "a", {})
    # Whoever takes it says what is wrong.
    assert fastest("a", {"a": fails, "b": fails}, clock) == Choice("a", "a", {})
    fails_at_last = clock.taking(*[1e-3] * 9, error)
    errors = {}
    ways = {"a": fails_at_last, "b": slow, "c": clock.taking(3e-3)}
    assert fastest("a", ways, clock, errors).variant == "b"
    assert errors == {"a": error}


def test_an_interrupt_goes_on():
    clock = Clock()
    with pytest.raises(KeyboardInterrupt):
        fastest("a", {"a": clock.taking(KeyboardInterrupt()), "b": clock.taking(1e-3)}, clock)


def test_each_case_is_measured_once_and_kept(idle):
    probe = Probe()
    ways = probe.ways(mask=2e-3, channels=1e-3)
    first = probe.chosen(ways, 40)
    assert first.variant == "channels"
    calls = ways["mask"].calls
    another = Autotune(probe.memory, None)
    for each in probe, another:
        assert each.choose(GPU, ("weights", 40), "mask", lambda: ways) is first
    assert ways["mask"].calls == calls
    probe.chosen(ways, 64)
    assert ways["mask"].calls == 2 * calls


def test_what_was_kept_counts_only_where_that_way_is_there(idle):
    probe = Probe()
    probe.memory.keep(GPU, ("weights",), Choice("kernel", "mask", {"mask": 2.0, "kernel": 1.0}))
    assert probe.chosen(probe.ways(mask=1e-3, channels=1e-3)).variant == "mask"


@pytest.mark.parametrize(
    ("times", "variant", "is_kept"),
    [
        # Next time there may be enough memory, but not another kernel.
        ({"mask": torch.OutOfMemoryError("no room"), "channels": 1e-3}, "channels", False),
        ({"mask": NotImplementedError("no such kernel"), "channels": 1e-3}, "channels", True),
        # Times of nothing.
        ({"mask": 0.0, "channels": 0.0}, "mask", False),
        # A single way is not tried.
        ({"mask": 1e-3}, "mask", False),
    ],
)
def test_what_cannot_be_compared_is_tried_once(idle, times, variant, is_kept):
    probe = Probe()
    ways = probe.ways(**times)
    assert probe.chosen(ways).variant == variant
    kept = {(GPU, ("weights",), "mask"): Choice(variant, "mask", {})}
    assert probe.memory == (kept if is_kept else {})
    calls = ways[variant].calls
    assert (calls == 0) == (len(ways) == 1)
    probe.chosen(ways)
    assert ways[variant].calls == calls


@pytest.mark.parametrize("part", ["read", "keep", "clock"])
def test_an_error_of_the_probe_is_no_error_of_the_run(part, idle, monkeypatch, caplog):
    probe = Probe()
    fails = probe.clock.taking(RuntimeError("cuDNN of another version"))
    if part == "clock":
        monkeypatch.setattr(probe.clock, "wait", fails)
    else:
        monkeypatch.setattr(probe.memory, part, fails)
    for size in 40, 64:
        ways = probe.ways(mask=2e-3, channels=1e-3)
        assert probe.chosen(ways, size) == Choice("mask", "mask", {})
    (record,) = caplog.records
    assert "cuDNN of another version" in record.getMessage()


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    probe = Probe()
    assert probe.choose(GPU, ("weights",), "mask", lambda: pytest.fail("tried")) is None
    assert probe.memory == {}


SWAPPED = "merge", "merge_keys", "add_change", "widen"
"""The operations that plain torch may take over."""


def timed(backend, clock, seconds):
    """The operations of plain torch under the name of a backend, timed by the clock."""
    ways = {name: clock.taking(seconds, does=getattr(TORCH, name)) for name in SWAPPED}
    return replace(TORCH, name=backend, **ways)


def operations_on(x, plan, ops):
    """The results of all operations that have several ways."""
    rows = plan.slot_of_token, plan.order, plan.offsets
    merged = ops.merge(x, *rows)
    log_sizes = plan.log_sizes()
    return [
        merged,
        *ops.merge_keys(x, *rows, 2),
        ops.add_change(x, merged, 2 * merged, plan.slot_of_token),
        *ops.widen(x, merged, merged, log_sizes, 2, 1.0, 2.0),
    ]


@pytest.mark.parametrize("is_slow", [True, False])
def test_plain_torch_takes_the_place_of_slow_kernels(is_slow, monkeypatch):
    probe = Probe()
    kernels = timed("triton", probe.clock, 2e-3 if is_slow else 1e-3)
    monkeypatch.setattr(autotune, "TORCH", timed("torch", probe.clock, 1e-3))
    tuner = Tuner(probe.choose)
    ops = tuned(kernels, tuner)
    x = torch.randn(2, 6, 8, device=DEVICE)
    plan = SlotPlan.from_slots(torch.tensor([[0, 1, 2, 0, 1, 2]] * 2, device=DEVICE), 3)
    assert_close(operations_on(x, plan, ops), operations_on(x, plan, TORCH))
    calls = kernels.merge.calls
    operations_on(x, plan, ops)
    assert kernels.merge.calls == calls + (not is_slow)
    assert {choice.variant for choice in tuner.choices.values()} == {
        "torch" if is_slow else "triton"
    }
    assert [case[0] for case in tuner.choices] == [*SWAPPED]


@pytest.fixture
def kernels():
    """The operations of Triton, where they run."""
    triton = pytest.importorskip("tome_nodes.ops.triton")
    if not triton.runs_on(DEVICE):
        pytest.skip("no kernels run on this device")
    return triton.TRITON


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_backend_that_was_asked_for_stays(backend, kernels, monkeypatch):
    monkeypatch.setattr(engine, "resolve", lambda *_: ("triton", None))
    monkeypatch.setattr(Autotune, "is_for", lambda *_: True)
    config = ToMeConfig(backend=backend)
    made = make_engine(config, make_strategy, DEVICE, torch.float32, autotune=Probe())
    assert made.tuner is not None
    assert (made.strategy.ops is kernels) == (backend == "triton")


def test_under_compile_the_default_is_taken_and_sizes_may_be_symbols():
    tuner = Tuner(Probe().choose)
    # It merges pairs of neighbours by their sum, unlike plain torch.
    ops = tuned(
        replace(TORCH, name="triton", merge=lambda x, *_: x.unflatten(1, (-1, 2)).sum(2)), tuner
    )
    graphs = []

    def compiled(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=compiled, fullgraph=True, dynamic=True)
    def merged(x, slot_of_token, order, offsets):
        return ops.merge(x, slot_of_token, order, offsets)

    for tokens in (32, 48, 80):
        x = torch.randn(1, tokens, 8, device=DEVICE)
        slots = torch.arange(tokens, device=DEVICE)[None] // 2
        plan = SlotPlan.from_slots(slots, tokens // 2)
        rows = plan.slot_of_token, plan.order, plan.offsets
        assert_close(merged(x, *rows), x.unflatten(1, (-1, 2)).sum(2))
    assert len(graphs) == 1
    assert tuner.choices == {}


def test_nearly_equal_numbers_of_tokens_are_one_case():
    def about(*size):
        return case_of(("merge", torch.Size(size), True))[1:-1]

    assert about(2, 4096, 320) == about(2, 4100, 320) == about(2, 4607, 320) == (2, 4096, 320)
    assert about(2, 8, 4607, 64) == (2, 8, 4096, 64)
    assert about(2, 4608, 321) == (2, 4608, 321)
    counts = [0, 1, 15, 16, 17, 18]
    assert [about(count) for count in counts] == [(0,), (1,), (15,), (16,), (16,), (18,)]
    tuner = Tuner(Probe().choose)
    ways = {"mask": lambda: None, "channels": lambda: None}
    for tokens in (1030, 1040):
        x = torch.zeros(1, tokens, 4, device=DEVICE)
        tuner.variant(x, ("weights", x.shape), "mask", lambda: ways)
    tuner.variant(x, ("weights", x.shape), "channels", lambda: ways)
    tuner.variant(x.mT.contiguous().mT, ("weights", x.shape), "mask", lambda: ways)
    assert len(tuner.choices) == 3
    assert all(type(part) in (str, int, bool) for case in tuner.choices for part in case)


def test_matching_is_not_chosen_by_time(kernels):
    """Its rounding decides what merges."""
    tuner = Tuner(Probe().choose)
    ops = tuned(kernels, tuner)
    strategy = make_strategy(ToMeConfig(strategy="window", min_tokens=1), ops)
    strategy.begin(torch.zeros((), dtype=torch.int64, device=DEVICE))
    plan = strategy.plan(torch.randn(1, 256, 16, device=DEVICE), Grid(16, 16), 0.5)
    assert plan.ops is ops
    assert tuner.choices == {}


def test_in_words():
    choices = {
        ("weights", 1024): Choice("mask", "mask", {"mask": 1e-4, "channels": 2e-4}),
        ("weights", 4096): Choice("channels", "mask", {"mask": 2e-3, "channels": 1.5e-3}),
        ("weights", 77): Choice("mask", "mask", {}),
        ("merge", 4096): Choice("triton", "triton", {"triton": 2e-5, "torch": 1e-4}),
    }
    weights = "weights by channels (1.5 ms, mask 2 ms)"
    assert log_line.tried(choices) == [weights, "merge by triton (0.02 ms, torch 0.1 ms)"]
    assert log_line.tried(choices, only_changed=True) == [weights]
    assert log_line.tried({}) == []
    choices |= {("weights", 9216): Choice("mask", "mask", {"mask": 8e-3, "channels": 9e-3})}
    choices |= {("widen", 9216): Choice("torch", "triton", {})}
    assert log_line.tried(choices)[0] == "weights by mask (8 ms, channels 9 ms)"
    assert log_line.tried(choices, only_changed=True) == [weights, "widen by torch (triton failed)"]
