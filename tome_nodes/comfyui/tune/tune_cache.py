"""Keep what ToMe Tune measured: a JSON file per kind of sampling run, in ComfyUI's user folder.

A file that cannot be used is measured anew, and replaced.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import folder_paths

from ...tuning.search import Measured

log = logging.getLogger("tome_nodes")

_ABOUT = "What ToMe Tune measured on this machine. Delete this file to forget it."


@dataclass(frozen=True)
class Kept:
    """What was measured for one kind of sampling run.

    Attributes:
        date: the day of the last trial, such as ``2026-11-23``.
        tried: what was measured, by the name of what was tried.
    """

    date: str = ""
    tried: Mapping[str, Measured] = field(default_factory=dict)


def digest(text: str) -> str:
    """A short text that stands for a long one."""
    return sha256(text.encode()).hexdigest()[:16]


def file(key: Mapping[str, Any]) -> Path:
    """The path of the file for a kind of sampling run, which need not exist."""
    name = digest(json.dumps(key, sort_keys=True))
    return Path(folder_paths.get_system_user_directory("tome_nodes")) / "tune" / f"{name}.json"


def read(key: Mapping[str, Any]) -> Kept:
    """What is kept for a kind of sampling run; nothing, and a warning, if it cannot be used."""
    path = file(key)
    try:
        return _read(path)
    except Exception as error:
        log.warning(
            "[ToMe] %s cannot be used, so ToMe Tune measures anew: %s: %s",
            *(path, type(error).__name__, error),
        )
        return Kept()


def _read(path: Path) -> Kept:
    """What is kept in a file, nothing if there is none; raises any error if it is of no use."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Kept()
    content = json.loads(text)
    tried = {name: Measured(**figures) for name, figures in content["tried"].items()}
    return Kept(str(content["date"]), tried)


def write(key: Mapping[str, Any], kept: Kept) -> None:
    """Keep what was measured for a kind of sampling run, and warn if that fails.

    What another process has kept in the meantime is kept, too. A reader never sees half a file.
    """
    path = file(key)
    with suppress(Exception):
        kept = replace(kept, tried={**_read(path).tried, **kept.tried})
    content = {"about": _ABOUT, "of": key, **asdict(kept)}
    beside = path.with_name(f"{path.stem}.{uuid4().hex}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        log.warning("[ToMe] what was measured is not kept: %s", error)
