"""Make the calls of a PyTorch module go through code of ours, and undo that.

Patching gives the model a subclass of its class, whose calls go to :class:`PatchedCalls`.
Between calls, the model holds only its settings, so copying, offloading, LoRA and saving work as
before. torch.compile leaves the code around the model's forward out of its graph, so it finds the
same code in every call.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from threading import local
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._dynamo.decorators import skip

from ..patching.engine import MakeStrategy
from ..settings.config import ToMeConfig
from ..strategies import make_strategy
from .log_once import LogOnce
from .patched_calls import PatchedCalls

_STATE = "_tome_nodes"
"""The attribute of a patched model for its :class:`NetworkPatch`."""

_OWN = "_tome_nodes_own"
"""The attribute of our class for the model's own."""


# None before PyTorch 2.15.
_set_frames: Callable[[int], int] | None = getattr(
    eval_frame, "set_fullgraph_compiled_frame_count", None
)


class Host:
    """A library whose models are called as modules.

    Attributes:
        forecasts: whether steps of its models are forecast and no tokens merge in them.
    """

    forecasts = False

    def find(self, model: object) -> Sequence[tuple[nn.Module, Any]]:
        """The networks to patch in what a user has passed, with their contexts.

        The context is what else :meth:`calls` has to know, such as the scheduler of a pipeline.
        """
        raise NotImplementedError

    def check(self, model: nn.Module, config: ToMeConfig, context: Any) -> None:
        """Check that a model, which :meth:`find` returned with its context, can be patched.

        Raises:
            TypeError: the model has no transformer blocks.
            ValueError: the settings can have no effect on this model, or in this context.
        """
        raise NotImplementedError

    def calls(self, patch: "NetworkPatch", model: nn.Module) -> PatchedCalls:
        """The calls of a patched model in one thread."""
        raise NotImplementedError


class NetworkPatch:
    """The settings of one patched model, and its calls.

    A copy of the model gets a new patch with the same settings. Each thread that calls the
    model has its own calls and its own sampling run.

    Attributes:
        context: the context of the model, see :meth:`Host.find`.
        once: logs what is said of the model.
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
        self.once = LogOnce()
        self._host = host
        self._of_thread = local()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config, self._host, self.context, self.make_strategy)

    def attach(self, model: nn.Module) -> None:
        """Make every call of a model go through its host. Earlier settings are replaced."""
        detach(model)
        if not self.config.does_nothing(self._host.forecasts):
            vars(model)[_STATE] = self
            kind: Any = type(model)
            model.__class__ = _patched(kind)

    @skip
    def call(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a model through its host; ``forward`` calls the model itself."""
        calls = self._calls_of(model)
        if calls.is_running:
            return forward(*args, **kwargs)
        calls.is_running = True
        try:
            result = calls.call(forward, args, kwargs)
        finally:
            calls.is_running = False
        _count_as_compiled()
        return result

    @torch.compiler.disable
    def _calls_of(self, model: nn.Module) -> PatchedCalls:
        """The calls of a model in this thread."""
        calls: PatchedCalls | None = getattr(self._of_thread, "calls", None)
        # Shallow copies of a model, such as replicas, share its patch.
        if calls is None or calls.network is not model:
            calls = self._of_thread.calls = self._host.calls(self, model)
        return calls


@skip
def _count_as_compiled() -> None:
    """Say that this call of a model has run something compiled, if that is asked.

    From PyTorch 2.15 on, a call of a model that was compiled with ``fullgraph`` raises an error if
    nothing compiled has run in it: no model runs in a forecast, and the compiler rests after it has
    failed on merging.
    """
    # A count that goes on stays as it is, unless it ends first.
    if _set_frames is not None and _set_frames(-1) >= 0:
        _set_frames(1)


def detach(model: nn.Module) -> None:
    """Give a patched model its own class back."""
    own: Any = vars(type(model)).get(_OWN)
    # A class that other code has derived from ours stays, and finds no patch.
    if vars(model).pop(_STATE, None) is not None and own is not None:
        model.__class__ = own


@lru_cache(maxsize=64)
def _patched(kind: Any) -> Any:
    """A subclass of ``kind`` whose instances are called through their patch, if any."""

    def calling(name: str) -> Callable[..., Any]:
        own = getattr(kind, name)

        @skip
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            patch: NetworkPatch | None = vars(self).get(_STATE)
            if patch is None:
                return own(self, *args, **kwargs)
            return patch.call(self, partial(own, self), *args, **kwargs)

        return call

    def reduce(self: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _new, (kind,), *state

    # The name of the class stays: a pipeline, for example, saves it.
    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    # The second calls a model that was compiled before it was patched.
    attributes |= {name: calling(name) for name in ("__call__", "_call_impl")}
    return type(kind.__name__, (kind,), attributes | {"__reduce_ex__": reduce, _OWN: kind})


def _new(kind: Any) -> Any:
    """An empty instance of a patched class, for copies."""
    patched = _patched(kind)
    return patched.__new__(patched)
