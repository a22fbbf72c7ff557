"""One cell of the table: a graph without our node, with it, and without it in fewer steps."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any
from unittest import mock

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from torch import Tensor

from benchmarks.forecasts import subjects
from benchmarks.forecasts.situations import SITUATIONS, Situation
from benchmarks.forecasts.subjects import Subject
from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import PRESET, settings_of

MOST, NOTHING = 1.15, 0.005
"""Ours may change the result at most ``MOST`` times as much as fewer steps do, or ``NOTHING``."""

_MANY = 2**20
"""More tokens than anything here has."""

SEEDS = (1, 2, 3, 4)
"""The seeds for samplers that add noise; others have only the first."""

_CHURN = {"s_churn": 1.0, "s_tmax": 0.9}
"""Options with which a sampler such as euler adds noise in each step."""

_ADD_NOISE = ("ancestral", "sde", "ddpm", "lcm", "seeds", "sa_solver", "s_churn")
"""Parts of the names of samplers that add noise."""

SAMPLERS = (
    *comfy.samplers.SAMPLER_NAMES,
    *(f"{name}, s_churn" for name in ("euler", "heun", "dpm_2", "heunpp2")),
)
"""The host's samplers, and some with churn."""

_NOTHING = re.compile(r"\[ToMe\] nothing was forecast: ")

FORECAST, ASIDE, NONE, WRONG = "forecast", "aside", "not possible", "wrong"


@dataclass(frozen=True)
class Graph:
    """A graph without our node.

    Attributes:
        sampler: one of :data:`SAMPLERS`.
        steps: how many the schedule has.
        guidance: the scale.
        negative: whether the negative prompt says anything.
        situation: the name of the situation, which says what else the graph has.
        scheduler: the name of the scheduler.
        shift: the shift of the noise levels; None for the model's own.
        on: the name of the subject, see :mod:`benchmarks.forecasts.subjects`.
    """

    sampler: str
    steps: int
    guidance: float
    negative: bool
    situation: str
    scheduler: str
    shift: float | None
    on: str = subjects.FLOW

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs whose mean counts."""
        return SEEDS if any(part in self.sampler for part in _ADD_NOISE) else SEEDS[:1]

    @property
    def subject(self) -> Subject:
        """The model that it runs on."""
        return subjects.of_name(self.on, SITUATIONS[self.situation].is_video)

    def in_words(self) -> str:
        """Its values, in one line."""
        negative = "a" if self.negative else "no"
        shift = "" if self.shift is None else f" with shift {self.shift:g}"
        on = "" if self.on == subjects.FLOW else f", on the {self.on}"
        return (
            f"{self.situation}, {self.sampler}, {self.steps} steps, {self.scheduler}{shift}, "
            f"guidance {self.guidance:g}, {negative} negative prompt{on}"
        )


@dataclass(frozen=True)
class Cell:
    """The result of a graph.

    Attributes:
        verdict: whether steps were forecast, or none were. It is ``wrong`` if none were, but the
            result differs or the log does not say why.
        evaluated: in how many steps the plain run evaluated the network.
        ours: the same with our node.
        fewer: the same in fewer steps.
        change, change_by_fewer: how much ours and fewer steps change the result.
        why: why nothing was forecast, in the words of the log, or why the graph cannot run.
    """

    verdict: str
    evaluated: int = 0
    ours: int = 0
    fewer: int = 0
    change: float = 0.0
    change_by_fewer: float = 0.0
    why: str = ""

    @property
    def ratio(self) -> float:
        """The change over the largest that is allowed; more than 1 is too much."""
        if self.verdict == WRONG:
            return float("inf")
        return self.change / max(MOST * self.change_by_fewer, NOTHING)

    def in_words(self) -> str:
        """The result, in one line."""
        if self.verdict != FORECAST:
            return f"{self.verdict}: {self.why}"
        return (
            f"{self.ours} of {self.evaluated} steps evaluated, change {self.change:.4f}, "
            f"by {self.fewer} steps {self.change_by_fewer:.4f}"
        )


@dataclass(frozen=True)
class Result:
    """The latent of a run, and in how many steps the network was evaluated."""

    latent: Tensor
    evaluated: int


def cell(graph: Graph) -> Cell:
    """Run a graph without our node and with it, and in fewer steps if any were forecast."""
    seed, *others = graph.seeds
    try:
        plain = [run(graph, seed)]
    except Exception as error:
        return Cell(NONE, why=f"alone, {_failure(error)}")
    if not plain[0].latent.isfinite().all():
        return Cell(NONE, why="alone, it gives no finite result")
    with _log_lines() as lines:
        ours = [run(graph, seed, with_ours=True)]
    counts = plain[0].evaluated, ours[0].evaluated
    reasons = [line for line in lines if _NOTHING.match(line)]
    why = "; ".join(dict.fromkeys(_NOTHING.sub("", line) for line in reasons))
    if len(reasons) == len(lines):
        is_same = torch.equal(plain[0].latent, ours[0].latent)
        return Cell(ASIDE if is_same and why else WRONG, *counts, why=why)
    plain += [run(graph, other) for other in others]
    ours += [run(graph, other, with_ours=True) for other in others]
    try:
        steps, first = _in_fewer_steps(graph, *counts)
        fewer = [first, *(run(graph, other, steps=steps) for other in others)]
    except Exception as error:
        return Cell(NONE, *counts, why=f"in fewer steps, {_failure(error)}")
    change, by_fewer = _change(graph, ours, plain), _change(graph, fewer, plain)
    return Cell(FORECAST, *counts, first.evaluated, change, by_fewer)


def _failure(error: Exception) -> str:
    return f"it fails: {type(error).__name__}: {str(error)[:100]}"


def _in_fewer_steps(graph: Graph, evaluated: int, ours: int) -> tuple[int, Result]:
    """The longest plain run that evaluates no more steps than ours, and the steps of its schedule.

    A run may evaluate fewer or more steps than its schedule has, since another node may leave out
    steps or add some.
    """
    plain = partial(run, graph, graph.seeds[0])
    steps = min(graph.steps, round(graph.steps * ours / evaluated))
    result = plain(steps=steps)
    while result.evaluated > ours and steps > 2:
        steps -= 1
        result = plain(steps=steps)
    while result.evaluated < ours and steps < graph.steps:
        longer = plain(steps=steps + 1)
        if longer.evaluated > ours:
            break
        steps, result = steps + 1, longer
    return steps, result


def _change(graph: Graph, results: list[Result], plain: list[Result]) -> float:
    """The mean difference of results."""
    pairs = zip(results, plain, strict=True)
    return mean(graph.subject.difference(one.latent, other.latent) for one, other in pairs)


def run(graph: Graph, seed: int, with_ours: bool = False, steps: int | None = None) -> Result:
    """Run a graph.

    Args:
        graph: the graph.
        seed: the seed of all noise.
        with_ours: whether our node is in the graph.
        steps: a number of steps to use instead of the graph's own.
    """
    situation, subject = SITUATIONS[graph.situation], graph.subject
    counter = _Counter(situation)
    model = subject.model
    if graph.shift is not None:
        (model,) = ModelSamplingSD3().patch(model, graph.shift)
    patches = [situation.patch, *([_ours] if with_ours else [])]
    for patch in reversed(patches) if situation.is_last else patches:
        model = patch(model)
    model = counter.watching(subject.finish(model))
    # EasyCache reads the noise levels of whatever the model sampled last.
    comfy.model_management.load_models_gpu([model])
    guider = comfy.samplers.CFGGuider(model)
    positive, negative = situation.prompts(subject)
    guider.set_conds(positive, negative if graph.negative else subjects.emptied(negative))
    guider.set_cfg(graph.guidance)
    name, _, churns = graph.sampler.partition(", ")
    sampler = comfy.samplers.sampler_object(name)
    sampler.extra_options = sampler.extra_options | (_CHURN if churns else {})
    sampler = situation.wrap(sampler)
    sigmas = subjects.sigmas_of(model, name, graph.scheduler, steps or graph.steps)
    batch = (situation.batch, *[1] * (len(subject.shape) - 1))
    first = subject.picture() if situation.begins else torch.zeros(subject.shape)
    latent = first.repeat(batch)
    noise = comfy.sample.prepare_noise(latent, seed)
    mask = torch.linspace(0, 1, latent.shape[-1]).expand(1, 1, *latent.shape[-2:])
    # Some samplers draw from the global generator.
    with torch.random.fork_rng(), torch.no_grad(), counter.memory():
        torch.manual_seed(seed)
        for levels in situation.passes(sigmas):
            added = noise if levels[0] > levels[-1] else torch.zeros_like(noise)
            given = added, latent, sampler, levels, mask if situation.masked else None
            latent = guider.sample(*given, disable_pbar=True, seed=seed)
            noise = torch.zeros_like(noise)
    return Result(latent, counter.evaluated)


def _ours(model: ModelPatcher) -> ModelPatcher:
    """The node's defaults without merging, since this table is about forecasts."""
    settings = settings_of(PRESET.default, {})
    return attach(model, ToMeConfig(**settings | {"min_tokens": _MANY}))


class _Counter:
    """Counts the steps that evaluate the network, and lets memory be short in some.

    Attributes:
        evaluated: how many there were.
    """

    def __init__(self, situation: Situation):
        self.evaluated = 0
        self._situation = situation
        self._guided = 0
        self._has_run = False

    def watching(self, model: ModelPatcher) -> ModelPatcher:
        """A clone of a model that counts, by the innermost wrapper but the denoiser's."""
        clone = model.clone()
        wrappers = clone.wrappers.setdefault(WrappersMP.DIFFUSION_MODEL, {})
        last = wrappers.pop("denoiser", None)
        wrappers["counter"] = [self._run]
        if last is not None:
            wrappers["denoiser"] = last
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "counter", self._guide)
        return clone

    def _run(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        self._has_run = True
        return executor(*args, **kwargs)

    def _guide(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Wraps each guided answer, within which guidance may evaluate the network, too."""
        self._has_run = False
        answer = executor(*args, **kwargs)
        self.evaluated += self._has_run
        self._guided += 1
        return answer

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Let memory be short in the steps that the situation names."""
        free = ModelPatcher.get_free_memory

        def left(patcher: ModelPatcher, device: torch.device) -> Any:
            return 0 if self._situation.is_short(self._guided) else free(patcher, device)

        with mock.patch.object(ModelPatcher, "get_free_memory", left):
            yield


@contextmanager
def _log_lines() -> Iterator[list[str]]:
    """What our log says while the block runs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tome_nodes")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
