"""One run, judged: it is done without token merging, then with it, and must leave no trace.

What the first leaves alive is the host's; so is an error that it raises, too.
"""

import logging
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import folder_paths
import torch
from comfy.model_management import InterruptProcessingException
from comfy_execution.graph import DynamicPrompt
from comfy_execution.progress import reset_progress_state
from comfy_execution.utils import CurrentNodeContext
from torch import Tensor, nn

from .draws import Beside, Draw, Fault, Sampling
from .models import Merging, Model, release
from .tally import Verdict
from .traces import LiveTensors, differences

CHECKED_EVERY = 10
"""In one run of so many, a fixed input shows whether the unpatched model is the same as ever."""

_FIXED = Sampling(size=(6, 7), seed=1)
_PICTURE_SIDE = 64

# How many tensors or modules a failure names.
_NAMED = 3

_PROMPT = "soak"
_GRAPH: Mapping[str, Any] = {
    "loader": {"class_type": "UNETLoader", "inputs": {}},
    "tome": {"class_type": "ToMePatchModel", "inputs": {"model": ["loader", 0]}},
    "sampler": {"class_type": "KSampler", "inputs": {"model": ["tome", 0]}},
    "report": {
        "class_type": "ToMeReport",
        "inputs": {"model": ["tome", 0], "samples": ["sampler", 0]},
    },
}


class OnPurposeError(Exception):
    """The exception in the middle of a run."""


_ERRORS: Mapping[str, type[BaseException]] = {
    "exception": OnPurposeError,
    "interrupt": InterruptProcessingException,
    "keyboard interrupt": KeyboardInterrupt,
}


class FailedError(Exception):
    """A run failed; the message says how."""


@dataclass(frozen=True)
class _Sampled:
    """The latents of the model, and of the one beside it; and whether the fault came about."""

    latents: Sequence[Tensor]
    stopped: bool = False


class Runs:
    """Does runs on a set of models, and judges them; if ``merging`` is None, what the host does.

    Attributes:
        traits: what may be drawn for the models.
    """

    def __init__(self, models: Mapping[str, Model], merging: Merging | None):
        self.traits = {name: model.traits for name, model in models.items()}
        self._models = models
        self._merging = merging
        self._exits = ExitStack()
        previews = self._exits.enter_context(tempfile.TemporaryDirectory())
        self._exits.callback(folder_paths.set_temp_directory, folder_paths.get_temp_directory())
        folder_paths.set_temp_directory(previews)
        self._fixed = {name: self._sample_fixed(name) for name in models}
        release()
        self._tensors = LiveTensors()
        self._exits.callback(self._tensors.close)

    def close(self) -> None:
        """Restore what was set for the runs in this process."""
        self._exits.close()

    def run(self, draw: Draw) -> Verdict:
        """Do a run and judge it."""
        beside = [] if draw.beside is None else [draw.beside.draw.model]
        names = [*dict.fromkeys([draw.model, *beside])]
        verdict = Verdict()
        try:
            expected = self._sample(draw, None)
        except FailedError as error:
            verdict.refused = str(error)
            self._left_alive(names)
            return verdict
        self._left_alive(names)
        before = {name: self._models[name].state() for name in names}
        with _log() as log:
            try:
                verdict.stopped = self._compare(draw, expected)
            except FailedError as error:
                verdict.failures.append(str(error))
        verdict.merged = any("[ToMe] merged" in line for _, line in log)
        verdict.failures += _warnings(log)
        del expected
        if left := self._left_alive(names):
            # The host may keep something of its latest run; now that is another one.
            self._sample(draw, None)
            self._left_alive(names)
            leaked = [tensor for each in left if (tensor := each()) is not None]
            verdict.leaked = len(leaked)
            if leaked:
                named = [f"{[*each.shape]} of {each.dtype}" for each in leaked[:_NAMED]]
                verdict.failures.append(f"{len(leaked)} tensors stay alive: {', '.join(named)}")
        for name in names:
            if changed := differences(before[name], self._models[name].state()):
                verdict.failures.append(f"{name} is not clean: {', '.join(changed[:_NAMED])}")
        if draw.number % CHECKED_EVERY == 0:
            verdict.failures += [
                f"{name}, unpatched, has another result than before all runs"
                for name in names
                if not _same(self._sample_fixed(name), self._fixed[name])
            ]
            self._left_alive(names)
        return verdict

    def _left_alive(self, names: Sequence[str]) -> list[weakref.ref[Tensor]]:
        """The tensors made since the last look that are still alive, except weights."""
        release()
        return self._tensors.new(self._models[name].module for name in names)

    def _sample_fixed(self, name: str) -> Tensor:
        (latent,) = self._sample(Draw(0, name, {}, _FIXED), None).latents
        return latent

    def _compare(self, draw: Draw, expected: _Sampled) -> bool:
        """Do a run with token merging; returns whether its fault came about.

        Raises:
            FailedError: it is not as it should be.
        """
        found = self._sample(draw, self._merging)
        for latent, plain in zip(found.latents, expected.latents, strict=True):
            if latent.shape != plain.shape:
                raise FailedError(f"the result is {[*latent.shape]} instead of {[*plain.shape]}")
            if plain.isfinite().all() and not latent.isfinite().all():
                raise FailedError("the result is not finite, but the unpatched model's is")
        if draw.removed and not _same(found.latents[0], expected.latents[0]):
            raise FailedError("merging was removed, and the result is not the unpatched model's")
        for index, (alone, merges) in enumerate(_by_themselves(draw)):
            undisturbed = self._sample(alone, self._merging if merges else None).latents[0]
            if _same(found.latents[index], undisturbed):
                continue
            # Another node may keep something of an aborted run.
            if _same(expected.latents[index], self._sample(alone, None).latents[0]):
                what = "after an aborted run" if draw.fault else "beside another model"
                raise FailedError(f"the result {what} is not that of a run by itself")
        return found.stopped

    def _sample(self, draw: Draw, merging: Merging | None) -> _Sampled:
        """Do a run; if it has a fault, do it again without.

        Raises:
            FailedError: it raised, other than by its fault.
        """
        try:
            with _workflow(draw), ExitStack() as exits:
                model = self._models[draw.model]
                with _node("tome"):
                    prepared = exits.enter_context(model.prepared(draw, merging))
                with _node("sampler"):
                    stopped = draw.fault is not None and _is_stopped(
                        model, prepared, draw.sampling, draw.fault
                    )
                    # Some of the other nodes take random numbers from it.
                    torch.manual_seed(draw.sampling.seed)
                    if draw.beside is None:
                        latents = [model.sample(prepared, draw.sampling, _nothing)]
                    else:
                        latents = self._sample_both(model, prepared, draw, draw.beside, merging)
                if draw.report is not None and merging is not None:
                    with _node("report"):
                        _report(merging, prepared, latents[0], draw.report)
                return _Sampled(latents, stopped)
        except FailedError:
            raise
        except Exception as error:
            # With its traceback, it would keep tensors alive.
            message = f"{type(error).__name__}: {error}"
        raise FailedError(message)

    def _sample_both(
        self, model: Model, prepared: Any, draw: Draw, beside: Beside, merging: Merging | None
    ) -> list[Tensor]:
        """Sample with a model, and with the one beside it while the first does."""
        second = self._models[beside.draw.model]
        is_on = threading.Event()
        results: list[Callable[[], Tensor]] = []

        def sample_second() -> Tensor:
            try:
                with second.prepared(beside.draw, merging if beside.merges else None) as other:
                    return second.sample(other, beside.draw.sampling, lambda step: is_on.set())
            finally:
                is_on.set()

        with ThreadPoolExecutor(1) as pool:

            def at_step(step: int) -> None:
                if step > 1:
                    return
                if beside.in_thread:
                    results.append(pool.submit(sample_second).result)
                    # From here on, both evaluate their models.
                    is_on.wait()
                else:
                    latent = sample_second()
                    results.append(lambda: latent)

            first = model.sample(prepared, draw.sampling, at_step)
        return [first, *(result() for result in results)]


def _by_themselves(draw: Draw) -> list[tuple[Draw, bool]]:
    """Runs that must have the same results as the parts of a run, and whether they merge."""
    if draw.beside is not None:
        return [(replace(draw, beside=None), True), (draw.beside.draw, draw.beside.merges)]
    return [] if draw.fault is None else [(replace(draw, fault=None, report=None), True)]


def _is_stopped(model: Model, prepared: Any, sampling: Sampling, fault: Fault) -> bool:
    """Sample until the fault comes about; returns whether it did.

    Raises:
        FailedError: it did, and something else came of it.
    """
    error = _ERRORS[fault.kind]("on purpose")
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fault.call:
            raise error

    with ExitStack() as hooks:
        at_step = fail
        if fault.place is not None:
            at_step = _nothing
            module = prepared if isinstance(prepared, nn.Module) else prepared.model
            layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
            layer = layers[int(fault.place * len(layers))]
            hooks.enter_context(layer.register_forward_pre_hook(fail))
        try:
            model.sample(prepared, sampling, at_step)
        except BaseException as caught:
            if caught is error:
                return True
            raise
    if calls >= fault.call:
        raise FailedError(f"the {fault.kind} in the middle of the run did not end it")
    return False


def _report(merging: Merging, model: Any, latent: Tensor, inputs: Mapping[str, Any]) -> None:
    image = torch.full((len(latent), _PICTURE_SIDE, _PICTURE_SIDE, 3), 0.5)
    picture = merging.report(model, latent, image, inputs)
    if picture.ndim != 4 or picture.shape[-1] != 3 or not picture.isfinite().all():
        raise FailedError(f"the report is no picture: {[*picture.shape]}")


@contextmanager
def _workflow(draw: Draw) -> Iterator[None]:
    """The workflow that runs, as the host knows it."""
    graph = dict(_GRAPH)
    if draw.report is None:
        del graph["report"]
    reset_progress_state(_PROMPT, DynamicPrompt(graph))
    try:
        yield
    finally:
        reset_progress_state("", DynamicPrompt({}))


def _node(name: str) -> CurrentNodeContext:
    return CurrentNodeContext(_PROMPT, name)


@contextmanager
def _log() -> Iterator[list[tuple[int, str]]]:
    """What the pack logs: levels and lines."""
    lines: list[tuple[int, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # The record itself may hold an error, whose traceback holds tensors.
            lines.append((record.levelno, record.getMessage()))

    logger = logging.getLogger("tome_nodes")
    level, propagates, handler = logger.level, logger.propagate, Keep()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        logger.setLevel(level)


def _warnings(log: Sequence[tuple[int, str]]) -> list[str]:
    """The warnings that tell of an error; that nothing merged is none."""
    lines = [line for level, line in log if level >= logging.WARNING]
    return [f"warned: {line}" for line in lines if not line.startswith("[ToMe] nothing merged")]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two latents are the same bit for bit, NaN included."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _nothing(step: int) -> None:
    pass
