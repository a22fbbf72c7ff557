"""Reach the attention of diffusers' transformers, without changing what other models call.

An attention processor calls a function of diffusers or PyTorch by a global name. For one
evaluation, an attention module gets a processor with the same code, whose globals have another
function under that name.
"""

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from diffusers.models import attention_dispatch
from torch import Tensor, nn

from ..patching.overrides import Override

Attend = Callable[..., Tensor]
"""Attends in place of an :class:`AttentionFunction`. It gets that function, whether the call is
plain (not causal, without dropout and so on), and the arguments of the call."""

_DISPATCH = "dispatch_attention_fn"
_PYTORCH = "scaled_dot_product_attention"

_DEEPEST = 3
"""How many functions a processor may call through to reach the attention function."""


class AttentionFunction:
    """An attention function of diffusers or PyTorch, called as ``merged_attention`` calls it.

    Attributes:
        __name__: the name by which :mod:`tome_nodes.patching.key_weights` knows it.
    """

    def __init__(self, function: Callable[..., Tensor], by_head: bool, others: dict[str, Any]):
        """Wrap a function.

        Args:
            function: the function to wrap.
            by_head: whether it gets queries, keys and values as
                ``[batch, heads, tokens, channels]``, and not ``[batch, tokens, heads, channels]``.
            others: arguments to pass on unchanged.
        """
        self.__name__ = "native" if by_head else _backend(others.get("backend"))
        self._function, self._by_head, self._others = function, by_head, others

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if not skip_reshape:
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        if not self._by_head:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = self._function(q, k, v, attn_mask=mask, **kwargs, **self._others)
        if skip_output_reshape:
            return out if self._by_head else out.transpose(1, 2)
        return (out.transpose(1, 2) if self._by_head else out).flatten(2)


def _backend(backend: Any) -> str:
    """The name of a backend of diffusers; of the active one for None."""
    if backend is None:
        backend, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))


def _plainly(func: AttentionFunction, is_plain: bool, *arguments: Any, **kwargs: Any) -> Tensor:
    return func(*arguments, **kwargs)


class _Reached(nn.Module):
    """Holds what attention calls during an evaluation, as its attribute ``attend``."""

    attend: Attend


_known: WeakKeyDictionary[nn.Module, dict[Any, tuple[_Reached, Any]]] = WeakKeyDictionary()
"""What modules run during an evaluation, by module and by what it replaces. They are kept so that
torch.compile finds its graph again."""


def reaching(block: nn.Module, attend: Attend) -> Iterator[Override]:
    """Overrides that make all attention in a block call ``attend`` in place of its function."""
    for module in block.modules():
        known = _known.setdefault(module, {})
        processor = getattr(module, "processor", None)
        kind: Any = type(processor)
        if callable(processor) and _reaches(kind.__call__):
            if kind not in known:
                known[kind] = (reached := _Reached()), _calling(kind, reached)
            reached, calling = known[kind]
            same = calling.__new__(calling)
            # It shares all state of the processor.
            same.__dict__ = processor.__dict__
            yield from ((reached, "attend", attend), (module, "processor", same))
        own = type(module).forward
        if "forward" not in vars(module) and _reaches(own):
            if own not in known:
                known[own] = (reached := _Reached()), _rebound(own, reached)
            reached, forward = known[own]
            yield from (
                (reached, "attend", attend),
                (module, "forward", MethodType(forward, module)),
            )


def _calling(kind: Any, reached: _Reached) -> Any:
    """A class of processors like ``kind``, except that they call ``reached.attend``."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), names | {"__call__": _rebound(kind.__call__, reached)})


def _reaches(function: Any, depth: int = _DEEPEST) -> TypeGuard[FunctionType]:
    """Whether a function calls attention, directly or through others of its module."""
    return isinstance(function, FunctionType) and bool(
        {_DISPATCH, _PYTORCH} & _names(function.__code__)
        or any(True for _ in _helpers(function, depth))
    )


def _names(code: CodeType) -> set[str]:
    """The global names and attributes used in some code, including the functions defined in it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _helpers(function: FunctionType, depth: int = _DEEPEST) -> Iterator[tuple[str, FunctionType]]:
    """The functions that a function calls, are of its module and call attention, by name."""
    if depth == 0:
        return
    for name in _names(function.__code__):
        each = function.__globals__.get(name)
        is_near = getattr(each, "__globals__", None) is function.__globals__
        if is_near and _reaches(each, depth - 1):
            yield name, each


def _rebound(function: FunctionType, reached: _Reached) -> FunctionType:
    """A copy of a function that calls ``reached.attend`` in place of attention functions."""
    names = dict(function.__globals__)
    # With it, torch.compile would look names up in the real module instead.
    del names["__name__"]
    if _DISPATCH in names:
        own = function.__globals__
        names[_DISPATCH] = _in_place_of(lambda: own[_DISPATCH], False, reached)
    for name, value in function.__globals__.items():
        if value is F:
            names[name] = functional = ModuleType("functional")
            vars(functional).update(vars(F))
            in_place = _in_place_of(lambda: F.scaled_dot_product_attention, True, reached)
            setattr(functional, _PYTORCH, in_place)
    names |= {name: _rebound(each, reached) for name, each in _helpers(function)}
    same = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    same.__kwdefaults__ = function.__kwdefaults__
    same.__annotations__ = function.__annotations__
    return same


def _in_place_of(
    find: Callable[[], Callable[..., Tensor]], by_head: bool, reached: _Reached
) -> Callable[..., Tensor]:
    """A function to call in place of the one that ``find`` returns.

    ``find`` is called each time, because other code may replace that function.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> Tensor:
        special = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "attention_kwargs": attention_kwargs,
        }
        others |= {name: value for name, value in special.items() if value}
        is_plain = not any(special.values()) and others.get("parallel_config") is None
        if enable_gqa:
            others["enable_gqa"] = True
        kwargs: dict[str, Any] = {"skip_reshape": True, "skip_output_reshape": True}
        if scale is not None:
            kwargs["scale"] = scale
        if not by_head:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        own = AttentionFunction(find(), by_head, others)
        # The evaluation of another thread may just have ended, and with it the attribute.
        attend = getattr(reached, "attend", _plainly)
        out = attend(own, is_plain, query, key, value, query.shape[1], attn_mask, **kwargs)
        return out if by_head else out.transpose(1, 2)

    return attention
