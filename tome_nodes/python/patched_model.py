"""Make the calls of a PyTorch module go through code of ours, and undo that.

Patching gives the model methods that go before those of its class, and send its calls to
:class:`PatchedCalls`. Its class and its ``forward`` stay, which pipelines and offloading look at.
Between calls, the model holds only its settings, so copying, LoRA and saving work as before.
torch.compile leaves the code around the model's forward out of its graph, so it finds the same code
in every call.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import local
from types import MethodType
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._dynamo.decorators import skip

from .. import reasons
from ..merging.engine import MakeStrategy
from ..settings.config import ToMeConfig
from ..strategies import make_strategy
from .log_once import LogOnce
from .patched_calls import PatchedCalls

_STATE = "_tome_nodes"
"""The attribute of a patched model for its :class:`NetworkPatch`."""

_COMPILED = "_compiled_call_impl"
"""The attribute of a model for what its ``compile`` made, which PyTorch calls first."""


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

        The context is what else :meth:`calls` has to know. As ``scheduling``, it has the
        :class:`~tome_nodes.python.scheduling.Scheduling` of the pipeline.
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
            _bind(model)
            if (compiled := vars(model).get(_COMPILED)) is not None:
                vars(model)[_COMPILED] = partial(_through_patch, model, compiled)

    @skip
    def call(
        self, model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a model through its host; ``forward`` calls the model itself."""
        self.context.scheduling.is_called = True
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

    def end_run(self) -> None:
        """End a run of the pipeline; if it called no network, say so once."""
        calls: PatchedCalls | None = getattr(self._of_thread, "calls", None)
        if calls is not None:
            calls.end_run()
        if self.context.scheduling.end_run():
            what = "was forecast" if self._host.forecasts else "merged"
            self.once.warn(f"nothing {what}: {reasons.NOT_CALLED}")

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
    """Take the patch off a model, if it has one."""
    own = vars(model)
    if own.pop(_STATE, None) is None:
        return
    for name, method in _METHODS.items():
        if getattr(own.get(name), "__func__", None) is method:
            del own[name]
    compiled = own.get(_COMPILED)
    if isinstance(compiled, partial) and compiled.func is _through_patch:
        _, own[_COMPILED] = compiled.args


def _bind(model: nn.Module) -> None:
    """Give a model our methods. Copies need them anew, as each is bound to its model."""
    vars(model).update({name: MethodType(method, model) for name, method in _METHODS.items()})


@skip
def _call(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return _through_patch(model, partial(type(model)._call_impl, model), *args, **kwargs)


@skip
def _through_patch(
    model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a model through its patch; ``forward`` calls the model itself."""
    patch: NetworkPatch | None = vars(model).get(_STATE)
    # What was compiled while the model was patched calls this later, too.
    if patch is None:
        return forward(*args, **kwargs)
    return patch.call(model, forward, *args, **kwargs)


def _reduce(model: nn.Module, protocol: SupportsIndex, /) -> tuple[Any, ...]:
    reduced: Any = type(model).__reduce_ex__(model, protocol)
    make, arguments, state, *rest = reduced
    others = {name: value for name, value in state.items() if name not in _METHODS}
    return _copy, (make, arguments), others, *rest


def _copy(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """A copy of a patched model, whose state is still to come."""
    model = make(*arguments)
    _bind(model)
    return model


def _replicate(model: nn.Module, /) -> nn.Module:
    replica = type(model)._replicate_for_data_parallel(model)
    _bind(replica)
    return replica


def _reset_stateful_cache(model: nn.Module, /, *args: Any, **kwargs: Any) -> None:
    """Pipelines call this at the end of a run, through other code's wrappers as well."""
    own = getattr(type(model), "_reset_stateful_cache", None)
    if own is not None:
        own(model, *args, **kwargs)
    patch: NetworkPatch | None = vars(model).get(_STATE)
    if patch is not None:
        patch.end_run()


# Copying and pickling ask the model for __reduce_ex__, not its class.
_METHODS: Mapping[str, Callable[..., Any]] = {
    "_call_impl": _call,
    "__reduce_ex__": _reduce,
    "_replicate_for_data_parallel": _replicate,
    "_reset_stateful_cache": _reset_stateful_cache,
}
"""What a patched model has in place of methods of its class."""
