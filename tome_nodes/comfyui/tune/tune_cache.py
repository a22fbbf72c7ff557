"""Keep what ToMe Tune measured: a JSON file per kind of sampling run, in ComfyUI's user folder.

A file that cannot be used is measured anew, and replaced.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

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
        content = json.loads(path.read_text(encoding="utf-8"))
        tried = {name: Measured(**figures) for name, figures in content["tried"].items()}
        return Kept(str(content["date"]), tried)
    except FileNotFoundError:
        return Kept()
    except Exception as error:
        log.warning(
            "[ToMe] %s cannot be used, so ToMe Tune measures anew: %s: %s",
            *(path, type(error).__name__, error),
        )
        return Kept()


def write(key: Mapping[str, Any], kept: Kept) -> None:
    """Keep what was measured for a kind of sampling run; a warning if that fails."""
    content = {"about": _ABOUT, "of": key, **asdict(kept)}
    path = file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("[ToMe] what was measured is not kept: %s", error)
