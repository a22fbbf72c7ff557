"""What ToMe Tune measured, kept in a JSON file in ComfyUI's user folder.

A file that is broken, or not ours, is left as it is: nothing is taken from it or written to it.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import folder_paths

from ...options import OPTIONS
from ...presets import PRESETS
from ...tuning.search import Candidate, Figures, Measured, Wish

log = logging.getLogger("tome_nodes")

_FORMAT = "ToMe Tune 1"
_ABOUT = "What ToMe Tune measured on this machine. Delete this file to forget it."
_MOST = 500
"""Measurements kept; the oldest are dropped."""


@dataclass(frozen=True)
class Kept:
    """What was measured for one kind of sampling run.

    Attributes:
        date: the day of the last trial, as ``2026-11-23``.
        figures: what was found.
        wishes: those whose best settings were looked for.
    """

    date: str = ""
    figures: Figures = field(default_factory=dict)
    wishes: tuple[Wish, ...] = ()


def file() -> Path:
    """The file, which need not exist."""
    return Path(folder_paths.get_system_user_directory("tome_nodes")) / "tune.json"


def read(key: Mapping[str, Any]) -> Kept:
    """What is kept for a kind of sampling run; empty if nothing is, or the file cannot be used."""
    return (_load() or {}).get(_line(key), Kept())


def write(key: Mapping[str, Any], kept: Kept) -> None:
    """Keep what was measured for a kind of sampling run, in place of what was kept for it."""
    entries = _load()
    if entries is None:
        return
    entries.pop(_line(key), None)
    entries[_line(key)] = kept
    text = {
        "format": _FORMAT,
        "about": _ABOUT,
        "measured": [
            {"of": json.loads(line), **_as_json(entry)}
            for line, entry in list(entries.items())[-_MOST:]
        ],
    }
    path = file()
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(text, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        log.warning("[ToMe] what was measured is not kept: %s", error)


def _load() -> dict[str, Kept] | None:
    """All that is kept, by key as a line of JSON; None if the file cannot be used."""
    path = file()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("[ToMe] %s cannot be read, so nothing is kept in it: %s", path, error)
        return None
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        return {_line(entry["of"]): _from_json(entry) for entry in found["measured"]}
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        log.warning(
            "[ToMe] %s is not a file of ToMe Tune, so nothing is kept in it until it is deleted: "
            "%s: %s",
            path,
            type(error).__name__,
            error,
        )
        return None


def _line(key: Mapping[str, Any]) -> str:
    if not isinstance(key, Mapping):
        raise TypeError("what was measured is not named by a JSON object")
    return json.dumps(key, sort_keys=True)


def _as_json(kept: Kept) -> dict[str, Any]:
    return {
        "date": kept.date,
        "figures": [
            {**each.settings, **_facts(measured)} for each, measured in kept.figures.items()
        ],
        "wishes": [asdict(wish) for wish in kept.wishes],
    }


def _facts(measured: Measured) -> dict[str, Any]:
    facts = asdict(measured)
    del facts["has_failed"]
    return facts


def _from_json(entry: Mapping[str, Any]) -> Kept:
    return Kept(
        _text(entry["date"]),
        {
            Candidate(_preset(each["preset"]), _ratio(each["ratio"])): Measured(
                _positive(each["seconds"]),
                _positive(each["unpatched"]),
                _number(each["change"]),
                None if each["obstacle"] is None else _text(each["obstacle"]),
            )
            for each in entry["figures"]
        },
        tuple(Wish(_text(each["goal"]), _number(each["amount"])) for each in entry["wishes"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _preset(value: Any) -> str:
    if value not in PRESETS:
        raise ValueError(f"there is no preset {value!r}")
    return str(value)


def _ratio(value: Any) -> float:
    OPTIONS["ratio"].check(value)
    return float(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _positive(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError(f"{value!r} is not above 0")
    return float(value)
