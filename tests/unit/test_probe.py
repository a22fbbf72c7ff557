"""Ways to do the same, tried once, with a clock that the tests set."""

from functools import partial
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from common import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tome_nodes.config import ToMeConfig
from tome_nodes.core.engine import make_engine
from tome_nodes.core.grid import Grid
from tome_nodes.core.plan import SlotPlan
from tome_nodes.core.probe import Probe, fastest
from tome_nodes.ops import reference
from tome_nodes.ops.choosing import ChoosingOperations, Probed
from tome_nodes.report import words
from tome_nodes.strategies import make_strategy

GPU = torch.device("cuda", 0)


class FakeClock:
    """Goes on by what each way says that it takes."""

    def __init__(self):
        self.time = 0.0
        self.waits = 0

    def now(self):
        return self.time

    def wait(self):
        self.waits += 1

    def between(self, start, end):
        return end - start

    def taking(self, *seconds):
        """A way that takes these times, one after the other, and the last from then on."""
        left = [*seconds]

        def way():
            way.calls += 1
            self.time += left.pop(0) if len(left) > 1 else left[0]

        way.calls = 0
        return way


class Memory(dict):
    """A store that is gone with the test."""

    def read(self, device, case, default):
        return self.get((device, case, default))

    def keep(self, device, case, probed):
        self[device, case, probed.default] = probed


@pytest.fixture
def idle(monkeypatch):
    """No graph is captured; there is no GPU that could be asked."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


SECONDS = st.floats(1e-6, 1e-3)


@given(st.lists(st.lists(SECONDS, min_size=9, max_size=9), min_size=2, max_size=4))
def test_the_fastest_is_taken_if_it_is_a_tenth_faster_than_the_default(times):
    clock = FakeClock()
    # The first call, which compiles, and two more do not count.
    ways = {str(index): clock.taking(1.0, *each) for index, each in enumerate(times)}
    found = fastest("0", ways, clock)
    medians = [median(each[2:]) for each in times]
    assert found.seconds == pytest.approx({name: medians[int(name)] for name in ways}, rel=1e-6)
    assert {way.calls for way in ways.values()} == {10}
    best = min(medians)
    if medians[0] > 1.1001 * best:
        assert medians[int(found.way)] == pytest.approx(best, rel=1e-6)
    if medians[0] < 1.0999 * best:
        assert found.way == "0"


def test_long_ways_run_less_often():
    clock = FakeClock()
    ways = {"mask": clock.taking(2.0), "kernel": clock.taking(1.0)}
    assert fastest("mask", ways, clock).way == "kernel"
    # To compile, to see that it takes long, and once to count.
    assert [way.calls for way in ways.values()] == [3, 3]


def test_a_way_that_fails_is_left_out():
    def fails():
        raise torch.OutOfMemoryError("no room")

    clock = FakeClock()
    slow, quick = clock.taking(2e-3), clock.taking(1e-3)
    found = fastest("a", {"a": fails, "b": slow, "c": quick}, clock)
    assert (found.way, found.seconds.keys()) == ("c", {"b", "c"})
    assert fastest("a", {"a": slow, "b": fails}, clock) == Probed("a", "a", {})
    assert fastest("a", {"a": fails, "b": slow}, clock) == Probed("b", "a", {})
    # Whoever takes it says what is wrong.
    assert fastest("a", {"a": fails, "b": fails}, clock) == Probed("a", "a", {})


def test_an_interrupt_goes_on():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fastest("a", {"a": interrupted, "b": lambda: None}, FakeClock())


def test_each_case_is_measured_once_and_kept(idle):
    clock, memory = FakeClock(), Memory()
    probe = Probe(memory, lambda device: clock)
    ways = {"mask": clock.taking(2e-3), "channels": clock.taking(1e-3)}
    first = probe.choose(GPU, ("weights", 40), "mask", lambda: ways)
    assert first.way == "channels"
    calls = ways["mask"].calls
    assert probe.choose(GPU, ("weights", 40), "mask", lambda: ways) is first
    assert Probe(memory, None).choose(GPU, ("weights", 40), "mask", lambda: ways) is first
    assert ways["mask"].calls == calls
    probe.choose(GPU, ("weights", 64), "mask", lambda: ways)
    assert ways["mask"].calls == 2 * calls


def test_what_was_kept_counts_only_where_that_way_is_there(idle):
    clock, memory = FakeClock(), Memory()
    memory.keep(GPU, ("weights",), Probed("kernel", "mask", {"mask": 2.0, "kernel": 1.0}))
    probe = Probe(memory, lambda device: clock)
    ways = {"mask": clock.taking(1e-3), "channels": clock.taking(1e-3)}
    assert probe.choose(GPU, ("weights",), "mask", lambda: ways).way == "mask"


def test_what_could_not_be_tried_is_not_kept(idle):
    def fails():
        raise torch.OutOfMemoryError("no room")

    clock, memory = FakeClock(), Memory()
    probe = Probe(memory, lambda device: clock)
    ways = {"mask": fails, "channels": clock.taking(1e-3)}
    assert probe.choose(GPU, ("weights",), "mask", lambda: ways).way == "channels"
    assert memory == {}


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    memory = Memory()
    assert Probe(memory).choose(GPU, ("weights",), "mask", lambda: pytest.fail("tried")) is None
    assert memory == {}


def test_a_cpu_is_not_probed():
    engine = make_engine(
        ToMeConfig(), make_strategy, torch.device("cpu"), torch.float32, probe=Probe(Memory())
    )
    assert engine.strategy.ops is reference
    assert engine.choices == {}


class OnAnyDevice(Probe):
    """A probe of a CPU, too, in place of a GPU."""

    def __init__(self, clock):
        super().__init__(Memory(), lambda device: clock)

    def is_for(self, device):
        return True


SWAPPED = "merge", "merge_keys", "add_change", "widen"
"""The operations that plain torch may take over."""


def backend(clock, seconds):
    """The operations of plain torch under the name of the other backend, timed by the clock."""

    plain = {name: getattr(reference, name) for name in SWAPPED}

    def timed(name):
        def run(*arguments):
            run.calls += 1
            clock.time += seconds
            return plain[name](*arguments)

        run.calls = 0
        return run

    return SimpleNamespace(
        NAME="triton",
        attend=reference.attend,
        unmerge=reference.unmerge,
        **{name: timed(name) for name in plain},
    )


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
    clock = FakeClock()
    kernels = backend(clock, 2e-3 if is_slow else 1e-3)
    for name in SWAPPED:
        plain = getattr(reference, name)

        def timed(*arguments, plain=plain):
            clock.time += 1e-3
            return plain(*arguments)

        monkeypatch.setattr(reference, name, timed)
    ops = ChoosingOperations(kernels, OnAnyDevice(clock).choose, may_use_torch=True)
    x = torch.randn(2, 6, 8, device=DEVICE)
    plan = SlotPlan.from_slots(torch.tensor([[0, 1, 2, 0, 1, 2]] * 2, device=DEVICE), 3)
    expected = operations_on(x, plan, reference)
    actual = operations_on(x, plan, ops)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
    calls = kernels.merge.calls
    operations_on(x, plan, ops)
    assert kernels.merge.calls == calls + (not is_slow)
    assert {choice.way for choice in ops.choices.values()} == {"torch" if is_slow else "triton"}
    assert [case[0] for case in ops.choices] == [*SWAPPED]


def test_a_backend_that_was_asked_for_stays():
    clock = FakeClock()
    kernels = backend(clock, 1.0)
    ops = ChoosingOperations(kernels, OnAnyDevice(clock).choose, may_use_torch=False)
    x = torch.randn(1, 4, 8, device=DEVICE)
    plan = SlotPlan.from_slots(torch.tensor([[0, 1, 0, 1]], device=DEVICE), 2)
    operations_on(x, plan, ops)
    assert ops.choices == {}
    assert kernels.merge.calls == 1


def test_under_compile_the_default_is_taken():
    ops = ChoosingOperations(reference, OnAnyDevice(FakeClock()).choose, may_use_torch=True)

    @torch.compile(backend="eager", fullgraph=True)
    def chosen(x):
        way = ops.chosen(x, ("weights",), "mask", lambda: {"mask": x.sum, "channels": x.mean})
        return x + 1 if way == "mask" else x - 1

    x = torch.zeros(3, device=DEVICE)
    assert torch.equal(chosen(x), x + 1)
    assert ops.choices == {}


@pytest.mark.parametrize("way", ["triton", "torch"])
def test_windows_are_matched_by_the_fastest(way):
    kernels = pytest.importorskip("tome_nodes.ops.kernels")
    if not kernels.runs_on(torch.device(DEVICE)):
        pytest.skip("no kernels run on this device")
    config = ToMeConfig(strategy="window", min_tokens=1)
    seconds = {"triton": 2e-3, "torch": 1e-3} if way == "torch" else {"triton": 1e-3, "torch": 2e-3}
    clock, asked = FakeClock(), []

    def choose(device, case, default, ways):
        asked.append((case[0], default))
        offered = {name: partial(timed, name, each) for name, each in ways().items()}
        return fastest(default, offered, clock)

    def timed(name, each):
        each()
        clock.time += seconds[name]

    strategy = make_strategy(config, ChoosingOperations(kernels, choose, may_use_torch=True))
    features = torch.randn(1, 256, 16, device=DEVICE)
    strategy.begin(torch.zeros((), dtype=torch.int64, device=DEVICE))
    plan = strategy.plan(features, Grid(16, 16), 0.5)
    assert asked[0] == ("match", "triton")
    assert strategy.ops.choices[next(iter(strategy.ops.choices))].way == way
    # Only the kernel numbers slots window by window.
    assert (plan.window is None) == (way == "torch")
    assert plan.ops is strategy.ops


def test_in_words():
    choices = {
        ("weights", 1024): Probed("mask", "mask", {"mask": 1e-4, "channels": 2e-4}),
        ("weights", 4096): Probed("channels", "mask", {"mask": 2e-3, "channels": 1.5e-3}),
        ("weights", 77): Probed("mask", "mask", {}),
        ("merge", 4096): Probed("triton", "triton", {"triton": 2e-5, "torch": 1e-4}),
    }
    weights = "weights by channels (1.5 ms, mask 2 ms)"
    assert words.fastest(choices) == [weights, "merge by triton (0.02 ms, torch 0.1 ms)"]
    assert words.fastest(choices, only_changed=True) == [weights]
    assert words.fastest({}) == []
