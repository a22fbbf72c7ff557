"""One run, judged: it is done without token merging, then with it, and must leave no trace.

What the first leaves alive is the host's; so is an error that it raises, too.
"""

import logging
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
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

from .draws import Draw, Fault, Sampling
from .models import Merging, Model, release
from .tally import Verdict
from .traces import LiveTensors, differences

CHECKED_EVERY = 7
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
    """The latent of the model, and whether the fault came about."""

    latent: Tensor
    stopped: bool = False


class Runs:
    """Does runs on a set of models, and judges them.

    Attributes:
        traits: what may be drawn for the models.
    """

    def __init__(self, models: Mapping[str, Model], merging: Merging):
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
        name = draw.model
        verdict = Verdict()
        try:
            expected = self._sample(draw, None)
        except FailedError as error:
            verdict.refused = str(error)
            self._left_alive(name)
            return verdict
        self._left_alive(name)
        before = self._models[name].state()
        with _log() as log:
            try:
                verdict.stopped = self._compare(draw, expected)
            except FailedError as error:
                verdict.failures.append(str(error))
        verdict.merged = any("[ToMe] merged" in line for _, line in log)
        verdict.forecast = any("[ToMe] forecast" in line for _, line in log)
        verdict.failures += _warnings(log)
        del expected
        if left := self._left_alive(name):
            # The host may keep something of its latest run; now that is another one.
            self._sample(draw, None)
            self._left_alive(name)
            leaked = [tensor for each in left if (tensor := each()) is not None]
            verdict.leaked = len(leaked)
            if leaked:
                named = [f"{[*each.shape]} of {each.dtype}" for each in leaked[:_NAMED]]
                verdict.failures.append(f"{len(leaked)} tensors stay alive: {', '.join(named)}")
        if changed := differences(before, self._models[name].state()):
            verdict.failures.append(f"{name} is not clean: {', '.join(changed[:_NAMED])}")
        if draw.number % CHECKED_EVERY == 0:
            if not _same(self._sample_fixed(name), self._fixed[name]):
                verdict.failures.append(f"{name}, unpatched, has another result than before")
            self._left_alive(name)
        return verdict

    def _left_alive(self, name: str) -> list[weakref.ref[Tensor]]:
        """The tensors made since the last look that are still alive, except weights."""
        release()
        return self._tensors.new(self._models[name].patcher.model)

    def _sample_fixed(self, name: str) -> Tensor:
        return self._sample(Draw(0, name, {}, _FIXED), None).latent

    def _compare(self, draw: Draw, expected: _Sampled) -> bool:
        """Do a run with token merging; returns whether its fault came about.

        Raises:
            FailedError: it is not as it should be.
        """
        found = self._sample(draw, self._merging)
        latent, plain = found.latent, expected.latent
        if latent.shape != plain.shape:
            raise FailedError(f"the result is {[*latent.shape]} instead of {[*plain.shape]}")
        if plain.isfinite().all() and not latent.isfinite().all():
            raise FailedError("the result is not finite, but the unpatched model's is")
        if draw.removed and not _same(latent, plain):
            raise FailedError("merging was removed, and the result is not the unpatched model's")
        if draw.fault is not None:
            whole = replace(draw, fault=None, report=None)
            is_same = _same(latent, self._sample(whole, self._merging).latent)
            # Another node may keep something of an aborted run.
            if not is_same and _same(plain, self._sample(whole, None).latent):
                raise FailedError("the result after an aborted run is not that of a run by itself")
        return found.stopped

    def _sample(self, draw: Draw, merging: Merging | None) -> _Sampled:
        """Do a run; if it has a fault, do it again without.

        Raises:
            FailedError: it raised, other than by its fault.
        """
        try:
            with _workflow(draw):
                model = self._models[draw.model]
                with _node("tome"):
                    prepared = model.prepared(draw, merging)
                with _node("sampler"):
                    stopped = draw.fault is not None and _is_stopped(
                        model, prepared, draw, draw.fault
                    )
                    # Some of the other nodes take random numbers from it.
                    torch.manual_seed(draw.sampling.seed)
                    latent = model.sample(prepared, draw, _nothing)
                if draw.report is not None and merging is not None:
                    with _node("report"):
                        _report(merging, prepared, latent, draw.report)
                return _Sampled(latent, stopped)
        except FailedError:
            raise
        except Exception as error:
            # With its traceback, it would keep tensors alive.
            message = f"{type(error).__name__}: {error}"
        raise FailedError(message)


def _is_stopped(model: Model, prepared: Any, draw: Draw, fault: Fault) -> bool:
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
            layers = [each for each in prepared.model.modules() if isinstance(each, nn.Linear)]
            layer = layers[int(fault.place * len(layers))]
            hooks.enter_context(layer.register_forward_pre_hook(fail))
        try:
            model.sample(prepared, draw, at_step)
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
    """The warnings that tell of an error; that nothing was done is none."""
    lines = [line for level, line in log if level >= logging.WARNING]
    return [f"warned: {line}" for line in lines if not line.startswith("[ToMe] nothing ")]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two latents are the same bit for bit, NaN included."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _nothing(step: int) -> None:
    pass
