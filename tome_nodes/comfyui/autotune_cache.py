"""Keep the variants that were fastest on the user's devices in a JSON file in the user folder."""

from collections.abc import Mapping
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from comfy.model_management import get_torch_device_name
from comfyui_version import __version__ as comfyui_version

from ..ops.autotune import Autotune, Case, Choice
from .json_cache import UserFile, line_of, positive, text

_METHOD = 3
"""Raise it when a kernel changes, or how variants are timed: older choices are then void."""


def _to_json(choice: Choice) -> dict[str, Any]:
    return {"way": choice.variant, "seconds": dict(choice.seconds)}


def _from_json(entry: Mapping[str, Any]) -> Choice:
    variant = text(entry["way"])
    seconds = {text(name): positive(time) for name, time in entry["seconds"].items()}
    if seconds and variant not in seconds:
        raise ValueError(f"there is no time of {variant!r}")
    return Choice(variant, text(entry["of"]["default"]), seconds)


FILE = UserFile(
    "probe.json",
    "ToMe probe 1",
    "Which ways to do the same were measured to be the fastest here. Delete this file and restart "
    "ComfyUI to have them measured again.",
    2000,
    _to_json,
    _from_json,
)


class KeptChoices:
    """The :class:`tome_nodes.ops.autotune.Store` of the choices in the file, which is read once."""

    def __init__(self) -> None:
        self._entries: dict[str, Choice] | None = None
        self._is_usable = True
        self._lock = Lock()

    def read(self, device: torch.device, case: Case, default: str) -> Choice | None:
        """See :meth:`tome_nodes.ops.autotune.Store.read`."""
        with self._lock:
            if self._entries is None:
                found = FILE.read()
                self._entries = found or {}
                self._is_usable = found is not None
            return self._entries.get(line_of(_key(device, case, default)))

    def keep(self, device: torch.device, case: Case, choice: Choice) -> None:
        """See :meth:`tome_nodes.ops.autotune.Store.keep`."""
        key = _key(device, case, choice.default)
        with self._lock:
            if self._entries is not None:
                self._entries[line_of(key)] = choice
            if self._is_usable:
                FILE.keep(key, choice)


@lru_cache(maxsize=1)
def autotune() -> Autotune:
    """The process's :class:`Autotune`, whose choices are kept for later processes."""
    return Autotune(KeptChoices())


def _key(device: torch.device, case: Case, default: str) -> dict[str, Any]:
    return {**_machine(device), "case": list(case), "default": default}


@lru_cache(maxsize=8)
def _machine(device: torch.device) -> Mapping[str, Any]:
    """All that times depend on, except the case."""
    is_gpu = device.type == "cuda"
    return {
        "device": get_torch_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)) if is_gpu else [],
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if is_gpu else None,
        "attentions": _attentions() if is_gpu else [],
        "triton": _version_of_triton(),
        "comfyui": comfyui_version,
        "method": _METHOD,
    }


def _attentions() -> list[str]:
    """The implementations of PyTorch's attention that are enabled."""
    cuda = torch.backends.cuda
    is_on = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return [name for name, value in is_on.items() if value]


def _version_of_triton() -> str:
    try:
        from ..ops.triton import VERSION
    except Exception:
        # A Triton that does not fit PyTorch or the system may raise any error.
        return "none"
    return str(VERSION)
