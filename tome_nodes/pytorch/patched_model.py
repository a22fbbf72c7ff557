"""Attach token merging to a model that is called as a PyTorch module, and take it off again.

Patching gives the model a subclass of its class. A call then puts the overrides on the transformer
blocks, runs the model and takes them off again. Between calls, the model holds only its settings,
so copying, offloading, LoRA and saving work as before. torch.compile leaves the code around the
model's forward out of its graph, so it finds the same code in each call.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from threading import local
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip

from ..patching.blocks import Reasons
from ..patching.engine import MakeStrategy
from ..patching.evaluation import Run
from ..patching.outcome import Evaluated, Observer
from ..report import log_line
from ..report.counts import Counts
from ..settings.config import ToMeConfig
from ..strategies import make_strategy

log = logging.getLogger("tome_nodes")

REASONS = Reasons(
    tokens_changed="other code changes the tokens of the transformer blocks",
    attention_masked="other code masks the attention or changes its tokens",
    attention_replaced="other code replaces the attention of the transformer blocks",
)

RECOMPUTED = "gradient checkpointing runs the transformer blocks again outside of the model's call"
"""The obstacle if a model computes gradients by running blocks a second time."""

_STATE = "_tome_nodes"
"""The attribute of a patched model for its :class:`Attachment`."""


class Host:
    """A library whose models are called as modules."""

    def find(self, model: object) -> Sequence[tuple[nn.Module, Any]]:
        """The networks to patch in what a user has passed, each with its context.

        The context is what else :meth:`calls` has to know, such as the scheduler of a pipeline.
        """
        raise NotImplementedError

    def check(self, model: nn.Module, config: ToMeConfig, context: Any) -> None:
        """Check that a model can be patched.

        Args:
            model: one that :meth:`find` returned.
            config: the settings.
            context: what it returned with the model.

        Raises:
            TypeError: the model has no transformer blocks.
            ValueError: an option cannot have an effect in this context.
        """
        if not self.has_blocks(model):
            raise TypeError(
                f"token merging needs a model with transformer blocks, and this "
                f"{type(model).__name__} has none"
            )

    def has_blocks(self, model: nn.Module) -> bool:
        """Whether a model has transformer blocks."""
        raise NotImplementedError

    def calls(self, attachment: "Attachment", model: nn.Module) -> "Calls":
        """The calls of a patched model in one thread."""
        raise NotImplementedError


class Attachment:
    """The settings of one patched model, and its calls.

    A copy of the model gets a new attachment with the same settings. Each thread that calls the
    model has its own calls and its own sampling run.

    Attributes:
        config: the settings.
        context: the context of the model, see :meth:`Host.find`.
        make_strategy: makes the strategy.
        reported: what has been logged, and is not logged again.
    """

    def __init__(
        self,
        config: ToMeConfig,
        host: Host,
        context: Any,
        make_strategy: MakeStrategy = make_strategy,
    ):
        self.config = config
        self.context = context
        self.make_strategy = make_strategy
        self.reported: set[Hashable] = set()
        self._host = host
        self._of_thread = local()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config, self._host, self.context, self.make_strategy)

    def attach(self, model: nn.Module) -> None:
        """Make each call of a model merge tokens. Earlier settings are replaced."""
        detach(model)
        if not self.config.merges_nothing:
            vars(model)[_STATE] = self
            kind: Any = type(model)
            model.__class__ = _patched(kind)

    @skip
    def call(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a model with merging; ``forward`` calls it without."""
        calls = self._calls_of(model)
        if calls.is_running or not calls.begin(args, kwargs):
            return forward(*args, **kwargs)

        result = calls.forecast()
        if result is None:
            result = calls.own_run.or_unmerged(partial(_evaluate, calls, forward, args, kwargs))
            result = calls.answered(result)
        calls.complete()
        return result

    @torch.compiler.disable
    def _calls_of(self, model: nn.Module) -> "Calls":
        """The calls of a model in this thread."""
        calls: Calls | None = getattr(self._of_thread, "calls", None)
        # Shallow copies of a model, such as replicas, share its attachment.
        if calls is None or calls.network is not model:
            calls = self._of_thread.calls = self._host.calls(self, model)
        return calls


@skip
def _evaluate(
    calls: "Calls", forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with calls:
        return forward(*args, **kwargs)


# torch.compile is to trace nothing around the model's forward.
skip(Run.or_unmerged)


def detach(model: nn.Module) -> None:
    """Give a patched model its own class back."""
    kind: Any = type(model)
    # A class that other code has derived from ours stays, and finds no attachment.
    if vars(model).pop(_STATE, None) is not None and kind is _patched(own := kind.__mro__[1]):
        model.__class__ = own


@lru_cache(maxsize=64)
def _patched(kind: Any) -> Any:
    """A subclass of ``kind`` whose instances merge tokens in calls, if they have an attachment."""

    def calling(name: str) -> Callable[..., Any]:
        own = getattr(kind, name)

        @skip
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            attachment: Attachment | None = vars(self).get(_STATE)
            if attachment is None:
                return own(self, *args, **kwargs)
            return attachment.call(self, partial(own, self), *args, **kwargs)

        return call

    def reduce(self: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _new, (kind,), *state

    # The name of the class stays: a pipeline, for example, saves it.
    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    # A model that was compiled before it was patched is called by the second.
    attributes |= {name: calling(name) for name in ("__call__", "_call_impl")}
    return type(kind.__name__, (kind,), attributes | {"__reduce_ex__": reduce})


def _new(kind: Any) -> Any:
    """An empty instance of a patched class, for copies."""
    patched = _patched(kind)
    return patched.__new__(patched)


class Latest(Observer):
    """Keeps what the latest evaluation did, as ``result``."""

    result: Evaluated | None = None

    def evaluated(self, result: Evaluated) -> None:
        self.result = result


class Calls:
    """The calls of a model in one thread.

    It is a context manager: after :meth:`begin`, the model runs within it.

    Attributes:
        config: the settings.
        network: the model that is called.
        run: the evaluations of the model, None before the first.
        latest: keeps what the latest evaluation did.
        is_running: whether the model is running.
        completed: whether the last call has returned.
    """

    def __init__(self, attachment: Attachment, network: nn.Module):
        self.config = attachment.config
        self.network = network
        self.run: Run | None = None
        self.latest = Latest()
        self.is_running = False
        self.completed = True
        self._reported = attachment.reported
        self._shape: Hashable = None
        self._arguments: tuple[Any, ...] = ()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begin a call; return whether its arguments are understood. If not, log that once."""
        raise NotImplementedError

    def prepare(self, shape: Hashable, *arguments: Any) -> None:
        """Set the ``arguments`` of :meth:`Run.evaluation` for a call; ``shape`` is logged once."""
        self.completed = False
        self.latest.result = None
        self._shape, self._arguments = shape, arguments

    def forecast(self) -> Any:
        """What the model is forecast to return in a call that has begun, None if it has to run."""
        return None

    def answered(self, result: Any) -> Any:
        """Note what the model returned, and return what the call is to return."""
        return result

    @torch.compiler.disable
    def __enter__(self) -> None:
        self._evaluation = self.own_run.evaluation(*self._arguments)
        self._evaluation.__enter__()
        self.is_running = True

    @torch.compiler.disable
    def __exit__(self, *error: Any) -> bool | None:
        self.is_running = False
        return self._evaluation.__exit__(*error)

    @torch.compiler.disable
    def complete(self) -> None:
        """End a call: log what merged, once for each shape, or why nothing merged, once."""
        self.completed = True
        result = self.latest.result
        if result is None or not result.is_active:
            return
        if result.is_forecast:
            if self._is_new("forecast"):
                ratio = self.config.ratio
                log.info(
                    "[ToMe] forecasts the answer of the model in some steps, ratio %.2f", ratio
                )
            return
        counts = Counts()
        counts.evaluated(result)
        if not counts.merged_anything:
            model = self.own_run.model
            reason = log_line.obstacle(counts, model.max_downsample, model.shallowest)
            # Where blocks merged before, a cache leaves them out in some steps: that is no fault.
            if self._shape not in self._reported or reason != REASONS.attention_replaced:
                self.warn_once(reason)
        elif self._is_new(self._shape):
            engine = self.own_run.engine
            backend = [] if engine is None else engine.in_words()
            log.info("[ToMe] %s", log_line.log_line(counts, self.config, backend))

    def warn_once(self, reason: str) -> None:
        if self._is_new(reason):
            log.warning("[ToMe] nothing merged: %s", reason)

    def _is_new(self, what: Hashable) -> bool:
        is_new = what not in self._reported
        self._reported.add(what)
        return is_new

    @property
    def own_run(self) -> Run:
        """:attr:`run`, once a call has begun."""
        assert self.run is not None
        return self.run


def execution_device(model: nn.Module, sample: Tensor) -> torch.device:
    """The device on which blocks will run. Until then, offloading may keep weights elsewhere."""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return sample.device if device is None else torch.device(device)
