"""One run, judged: it is done without token merging, then with it, and must leave no trace.

What the first leaves alive is the host's; so is an error that it raises, too.
"""

import logging
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import comfy.model_management
import folder_paths
import torch
from comfy_execution.graph import DynamicPrompt
from comfy_execution.progress import get_progress_state, reset_progress_state
from comfy_execution.utils import CurrentNodeContext
from torch import Tensor, nn

from .draws import Draw, Fault
from .models import Merging, Model
from .tally import Verdict
from .traces import LiveTensors, differences, state_of

NOTHING_DONE = r"\[ToMe\] (.*: )?(no step was shallow: .*; )?nothing "
"""The line of a run in which nothing was merged or skipped."""

CHECKED_EVERY = 7
"""In one run of so many, a fixed input shows whether the unpatched model is the same as ever."""

_PROMPT = "soak"
_GRAPH: Mapping[str, Any] = {
    "loader": {"class_type": "UNETLoader", "inputs": {}},
    "tome": {"class_type": "ToMePatchModel", "inputs": {"model": ["loader", 0]}},
    "sampler": {"class_type": "KSampler", "inputs": {"model": ["tome", 0]}},
}
_REPORT = {"model": ["tome", 0], "samples": ["sampler", 0]}

_ERRORS: Mapping[str, type[BaseException]] = {
    "exception": RuntimeError,
    "interrupt": comfy.model_management.InterruptProcessingException,
    "keyboard interrupt": KeyboardInterrupt,
}


class FailedError(Exception):
    """A run raised other than by its fault, or is not as it should be; the message says how."""


class Runs:
    """Does runs on a set of models, for which ``traits`` say what may be drawn, and judges them."""

    def __init__(self, models: Mapping[str, Model], merging: Merging):
        self.traits = {name: model.traits for name, model in models.items()}
        self._models = models
        self._merging = merging
        self._exits = ExitStack()
        previews = self._exits.enter_context(tempfile.TemporaryDirectory())
        self._exits.callback(folder_paths.set_temp_directory, folder_paths.get_temp_directory())
        folder_paths.set_temp_directory(previews)
        self._fixed = {name: self._sample_fixed(name) for name in models}
        _unload()
        self._tensors = LiveTensors()
        self._exits.callback(self._tensors.close)

    def close(self) -> None:
        """Restore what was set for the runs in this process."""
        self._exits.close()

    def run(self, draw: Draw) -> Verdict:
        name, verdict = draw.model, Verdict()
        model = self._models[name].patcher
        try:
            expected, _ = self._sample(draw, None)
        except FailedError:
            return Verdict(facts={"refused"})
        finally:
            self._left_alive(name)
        before = state_of(model)
        with _log() as log:
            try:
                if self._compare(draw, expected):
                    verdict.facts.add("stopped")
            except FailedError as error:
                verdict.failures.append(str(error))
        for fact in "merged", "shallow", "forecast":
            if any(re.match(rf"\[ToMe\] (.*[:,] )?{fact} \d", line) for _, line in log):
                verdict.facts.add(fact)
        # That nothing was done is a warning, but no error.
        verdict.failures += [
            f"warned: {line}"
            for level, line in log
            if level >= logging.WARNING and not re.match(NOTHING_DONE, line)
        ]
        del expected
        if left := self._left_alive(name):
            # The host may keep something of its latest run; now that is another one.
            self._sample(draw, None)
            self._left_alive(name)
            leaked = [tensor for reference in left if (tensor := reference()) is not None]
            if leaked:
                named = [f"{[*tensor.shape]} of {tensor.dtype}" for tensor in leaked[:3]]
                verdict.failures.append(f"{len(leaked)} tensors stay alive: {', '.join(named)}")
        if changed := differences(before, state_of(model)):
            verdict.failures.append(f"{name} is not clean: {', '.join(changed[:3])}")
        if draw.number % CHECKED_EVERY == 0:
            if not _same(self._sample_fixed(name), self._fixed[name]):
                verdict.failures.append(f"{name}, unpatched, has another result than before")
            self._left_alive(name)
        return verdict

    def _left_alive(self, name: str) -> list[weakref.ref[Tensor]]:
        """The tensors made since the last look that are still alive, except weights."""
        _unload()
        return self._tensors.new(self._models[name].patcher.model)

    def _sample_fixed(self, name: str) -> Tensor:
        return self._sample(Draw(0, name, {}, {"size": (6, 7)}), None)[0]

    def _compare(self, draw: Draw, plain: Tensor) -> bool:
        """Do a run with token merging as it should be; returns whether its fault came about."""
        latent, is_stopped = self._sample(draw, self._merging)
        if latent.shape != plain.shape:
            raise FailedError(f"the result is {[*latent.shape]} instead of {[*plain.shape]}")
        if plain.isfinite().all() and not latent.isfinite().all():
            raise FailedError("the result is not finite, but the unpatched model's is")
        if draw.removed and not _same(latent, plain):
            raise FailedError("merging was removed, and the result is not the unpatched model's")
        if draw.fault is not None:
            whole = replace(draw, fault=None, report=None)
            is_same = _same(latent, self._sample(whole, self._merging)[0])
            # Another node may keep something of an aborted run.
            if not is_same and _same(plain, self._sample(whole, None)[0]):
                raise FailedError("the result after an aborted run is not that of a run by itself")
        return is_stopped

    def _sample(self, draw: Draw, merging: Merging | None) -> tuple[Tensor, bool]:
        """Do a run; if it has a fault, do it again without, and tell whether that came about."""
        model = self._models[draw.model]
        try:
            with _workflow(draw):
                with CurrentNodeContext(_PROMPT, "tome"):
                    prepared = model.prepared(draw, merging)
                with CurrentNodeContext(_PROMPT, "sampler"):
                    is_stopped = _is_stopped(model, prepared, draw, draw.fault)
                    # Some of the other nodes take random numbers from it.
                    torch.manual_seed(draw.sampling.get("seed", 1))
                    latent = model.sample(prepared, draw)
                # The log has a line of a node once it is done.
                get_progress_state().finish_progress("sampler")
                if draw.report is not None and merging is not None:
                    with CurrentNodeContext(_PROMPT, "report"):
                        image = torch.full((len(latent), 64, 64, 3), 0.5)
                        picture = merging.report(prepared, latent, image, draw.report)
                    if picture.ndim != 4 or picture.shape[-1] != 3 or not picture.isfinite().all():
                        raise FailedError(f"the report is no picture: {[*picture.shape]}")
                return latent, is_stopped
        except FailedError:
            raise
        except Exception as error:
            # With its traceback, it would keep tensors alive.
            message = f"{type(error).__name__}: {error}"
        raise FailedError(message)


def _is_stopped(model: Model, prepared: Any, draw: Draw, fault: Fault | None) -> bool:
    """Sample until the fault comes about and is what ends the run; returns whether it did."""
    if fault is None:
        return False
    error, calls = _ERRORS[fault.kind]("on purpose"), 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fault.call:
            raise error

    with ExitStack() as hooks:
        if fault.place is not None:
            layers = [part for part in prepared.model.modules() if isinstance(part, nn.Linear)]
            layer = layers[int(fault.place * len(layers))]
            hooks.enter_context(layer.register_forward_pre_hook(fail))
        try:
            model.sample(prepared, draw, fail if fault.place is None else None)
        except BaseException as caught:
            if caught is error:
                return True
            raise
    if calls >= fault.call:
        raise FailedError(f"the {fault.kind} in the middle of the run did not end it")
    return False


@contextmanager
def _workflow(draw: Draw) -> Iterator[None]:
    graph = dict(_GRAPH)
    if draw.report is not None:
        graph["report"] = {"class_type": "ToMeReport", "inputs": _REPORT}
    reset_progress_state(_PROMPT, DynamicPrompt(graph))
    try:
        yield
    finally:
        reset_progress_state("", DynamicPrompt({}))


@contextmanager
def _log() -> Iterator[list[tuple[int, str]]]:
    lines: list[tuple[int, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # The record itself may hold an error, whose traceback holds tensors.
            lines.append((record.levelno, record.getMessage()))

    logger, handler = logging.getLogger("tome_nodes"), Keep()
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        logger.setLevel(level)


def _unload() -> None:
    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models()


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two latents are the same bit for bit, NaN included."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
