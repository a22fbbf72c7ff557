"""UNets under torch.compile: presets against the unpatched model, without and with CUDA graphs.

A compiler takes a minute or more for each model, so each has a process of its own: all compile side
by side, then run in turn.
"""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.pool import Pool
from typing import Any, NamedTuple

import comfy.model_management
import torch
import torch._inductor.config
from comfy_api.torch_helpers import set_torch_compile_wrapper
from torch._dynamo.utils import counters

from benchmarks import host
from benchmarks.rounds import interleaved
from benchmarks.speed.figures import Row
from benchmarks.speed.measure import Subject, look
from benchmarks.speed.methods import preset
from benchmarks.speed.models import SHAPES, load
from benchmarks.speed.record import Record, say

MODES = {"compiled": None, "CUDA graphs": "reduce-overhead"}
"""What the tables call a mode of ``torch.compile``."""

EVALUATIONS = 6
"""Evaluations timed in a row."""

ROUNDS = (3, 10)
"""The least and the most rounds of a comparison."""

_FIRST_EVALUATIONS = 3
"""With CUDA graphs, the second evaluation records and the third replays."""


@dataclass(frozen=True)
class Case:
    """A model to compile.

    Attributes:
        model: one of :data:`benchmarks.speed.models.SHAPES`.
        size: side of the picture in pixels.
        methods: presets, after the unpatched model.
        modes: some of :data:`MODES`.
    """

    model: str
    size: int
    methods: Sequence[str] = ("unpatched", "balanced", "fast")
    modes: Sequence[str] = tuple(MODES)

    @property
    def title(self) -> str:
        return f"{self.model}, {self.size}x{self.size}, compiled"


CASES = (Case("reduced sd15", 512), Case("reduced sdxl", 1024), Case("sdxl", 1024))
"""Cases for a GPU. In the small SDXL, nothing would merge at 512."""

DRY_CASES = (Case("reduced sd15", 224, methods=("unpatched", "balanced"), modes=("compiled",)),)

SECONDS = 15.0
"""How long the rounds of a case may take beyond the least number."""

_MOST_SECONDS = 60.0
"""How long an answer of a process may take."""


class _Way(NamedTuple):
    """What one process compiles."""

    case: Case
    method: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.case.title}: {self.method}, {self.mode}"


def run(record: Record, cases: Sequence[Case]) -> None:
    """Compile all cases side by side, and measure those that are ready in time."""
    # The largest take longest, so they begin first.
    ways = [
        _Way(case, *way) for case in reversed(cases) for way in product(case.methods, case.modes)
    ]
    workers = {way: process_on(record.device.type) for way in ways}
    try:
        ready = _ready(record, workers, cases)
        for case in cases:
            own = {way: workers[way] for way in ready if way.case == case}
            if own:
                record.compare(case.title, SECONDS / 2, partial(_measure, record, own))
    finally:
        for worker in workers.values():
            worker.terminate()


def process_on(device: str) -> Pool:
    """A process of its own, which knows its device before it imports any part of ComfyUI."""
    return multiprocessing.get_context("spawn").Pool(1, host.use, (device,))


def _ready(record: Record, workers: Mapping[_Way, Pool], cases: Sequence[Case]) -> list[_Way]:
    """Wait for the models that compile in time, end the others, and report both."""
    began = time.monotonic()
    ready = []
    waiting = {way: worker.apply_async(answer, (way, "count")) for way, worker in workers.items()}
    while waiting and record.left > SECONDS * len(cases):
        time.sleep(0.5)
        for way in [way for way, compiled in waiting.items() if compiled.ready()]:
            try:
                waiting.pop(way).get()
            except Exception as error:
                record.fail(way.name, error)
            else:
                ready.append(way)
                say(f"{way.name}: compiled after {time.monotonic() - began:.0f} s")
    for way in waiting:
        workers[way].terminate()
        record.result["left_out"].append(way.name)
    record.write()
    return [way for way in workers if way in ready]


def _measure(record: Record, workers: Mapping[_Way, Pool]) -> dict[str, Row]:
    """Look at each way of a case, then time all of them in turn."""

    def ask(way: _Way, question: str, *arguments: Any) -> Any:
        # A process that was killed would never answer.
        asked = workers[way].apply_async(answer, (way, question, *arguments))
        return asked.get(_MOST_SECONDS)

    rows: dict[str, dict[str, Any]] = {}
    runs = {}
    for way in workers:
        for mode in ("eager", way.mode) if way.mode == "compiled" else (way.mode,):
            name = f"{way.method}, {mode}"
            is_compiled = mode != "eager"
            rows[name] = ask(way, "look", is_compiled)
            runs[name] = partial(ask, way, "time", is_compiled)
    least, most = ROUNDS
    seconds = interleaved(runs, most, record.pace(least, SECONDS))
    for way in workers:
        rows[f"{way.method}, {way.mode}"] |= ask(way, "count")
    return {name: rows[name] | {"seconds": taken} for name, taken in seconds.items()}


class Compiled:
    """A model with and without its compiler."""

    @torch.no_grad()
    def __init__(self, way: _Way):
        device = comfy.model_management.get_torch_device()
        # Otherwise each process would compile in as many more as there are CPUs.
        torch._inductor.config.compile_threads = 1
        channels = SHAPES[way.case.model].context_channels
        self._subject = Subject(load(way.case.model), channels, way.case.size)
        model = self._subject.model
        if way.method != "unpatched":
            model = preset(way.method)(model)
        compiled = model.clone()
        # For a CPU, inductor would take minutes.
        backend = "inductor" if device.type == "cuda" else "eager"
        set_torch_compile_wrapper(compiled, backend=backend, mode=MODES[way.mode])
        self._models = model, compiled
        first = [nullcontext()] * (_FIRST_EVALUATIONS if device.type == "cuda" else 1)
        self._eager = self._subject.run(model, *first)
        counters.clear()
        self._subject.run(compiled, *first)
        self._graphs = counters["stats"]["unique_graphs"]

    @torch.no_grad()
    def look(self, is_compiled: bool) -> dict[str, Any]:
        """The figures of :func:`benchmarks.speed.measure.look`; errors are against no compiler."""
        return look(self._subject, self._models[is_compiled], self._eager[0])

    @torch.no_grad()
    def time(self, is_compiled: bool) -> float:
        """Seconds of an evaluation."""
        evaluations = EVALUATIONS if self._subject.device.type == "cuda" else 1
        return self._subject.time(self._models[is_compiled], evaluations)

    def count(self) -> dict[str, int]:
        """Graphs of the first evaluations, graph breaks, and graphs made after them."""
        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        return {"graphs": self._graphs, "breaks": breaks, "recompiles": graphs - self._graphs}


_made: dict[_Way, Compiled] = {}
"""What this process has compiled."""


def answer(way: _Way, question: str, *arguments: Any) -> Any:
    """Call a method of the model that this process compiles, which it compiles first.

    Raises:
        RuntimeError: if that fails. Other errors may not survive the way between two processes.
    """
    try:
        if way not in _made:
            _made[way] = Compiled(way)
        return getattr(_made[way], question)(*arguments)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}".splitlines()[0]) from None
