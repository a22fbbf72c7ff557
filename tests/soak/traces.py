"""What a run leaves behind: on models, in tensors that stay alive, in memory."""

import ctypes
import gc
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil
import torch
from torch import Tensor, nn

# A constant of glibc's malloc.h.
_M_ARENA_MAX = -8

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def state_of(patcher: Any) -> dict[str, Any]:
    """What can be put on a model and could be left there, by name.

    That is all that its patcher holds, and on its modules attributes, overrides of forward, and
    hooks.
    """
    state: dict[str, Any] = {}
    for name, module in patcher.model.named_modules():
        attributes = vars(module)
        state[name] = (
            sorted(attributes),
            id(attributes.get("forward")),
            {key: [*hooks] for key, hooks in attributes.items() if "_hooks" in key and hooks},
        )
    held = {name: value for name, value in vars(patcher).items() if name != "model"}
    return state | {f"patcher.{name}": _shape(value) for name, value in held.items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*before, *after])
    return [name for name in names if before.get(name) != after.get(name)]


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shape(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_shape(part) for part in value]
    return value if isinstance(value, _PLAIN) else id(value)


class LiveTensors:
    """The tensors that Python code can reach, except those of before, which are frozen.

    This also makes a look a matter of milliseconds.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        gc.unfreeze()

    def new(self, model: nn.Module) -> list[weakref.ref[Tensor]]:
        """The tensors since the last look, except the weights of a model."""
        gc.collect()
        # The class of a proxy may be that of what it stands for, so ask for the type.
        alive = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        weights = {id(weight) for weight in (*model.parameters(), *model.buffers())}
        new = {
            id(tensor): tensor
            for tensor in alive
            if self._known.get(id(tensor)) is not tensor and id(tensor) not in weights
        }
        self._known.update(new)
        return [weakref.ref(tensor) for tensor in new.values()]


def steady_memory() -> None:
    """Have the libraries below keep little for later; call it before anything is computed.

    oneDNN keeps memory for each size of a convolution, with token merging or without, and glibc an
    arena for each thread that has ended.
    """
    torch.backends.mkldnn.set_flags(False)
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def resident_bytes() -> int:
    """The memory of this process, without the freed pages that glibc only keeps for later."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss
