"""Keep what ToMe Tune measured in a JSON file in ComfyUI's user folder.

A file that is broken or has another format is neither used nor overwritten. It is replaced at once,
so it is whole at any time. Of two processes that write at the same time, one may lose its entry,
which is then measured again.
"""

import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import folder_paths

from ...settings.config import OPTIONS
from ...settings.presets import PRESETS
from ...tuning.search import Candidate, Figures, Measured, Wish

log = logging.getLogger("tome_nodes")

_FORMAT = "ToMe Tune 1"
_ABOUT = "What ToMe Tune measured on this machine. Delete this file to forget it."

_MOST = 500
"""The most entries in the file; the oldest are dropped."""


@dataclass(frozen=True)
class Kept:
    """What was measured for one kind of sampling run.

    Attributes:
        date: the day of the last trial, such as ``2026-11-23``.
        figures: what was measured, by settings.
        wishes: the wishes for which the search was finished.
        instead: what was measured of the alternatives to some settings, by their names.
    """

    date: str = ""
    figures: Figures = field(default_factory=dict)
    wishes: tuple[Wish, ...] = ()
    instead: Mapping[Candidate, Mapping[str, Measured]] = field(default_factory=dict)


def read(key: Mapping[str, Any]) -> Kept:
    """What is kept for a kind of sampling run; empty if nothing is, or if the file is unusable."""
    return (_entries() or {}).get(_line_of(key), Kept())


def write(key: Mapping[str, Any], kept: Kept) -> None:
    """Keep what was measured for a kind of sampling run, in place of an earlier entry.

    If that fails, there is a warning in the log.
    """
    entries = _entries()
    if entries is None:
        return
    entries.pop(_line_of(key), None)
    entries[_line_of(key)] = kept
    measured = [
        {"of": json.loads(line), **_to_json(each)} for line, each in [*entries.items()][-_MOST:]
    ]
    content = {"format": _FORMAT, "about": _ABOUT, "measured": measured}
    document = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path = file()
    draft = path.with_suffix(f".{uuid4().hex}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(document, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        log.warning("[ToMe] what was measured is not kept: %s", error)
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def file() -> Path:
    """The path of the file, which need not exist."""
    return Path(folder_paths.get_system_user_directory("tome_nodes")) / "tune.json"


def _entries() -> dict[str, Kept] | None:
    """All entries by the :func:`_line_of` of their keys; empty if there is no file.

    None, and a warning in the log, if the file cannot be used.
    """
    path = file()
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("[ToMe] %s cannot be read, so nothing is kept in it: %s", path, error)
        return None
    try:
        found = json.loads(content)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        return {_line_of(each["of"]): _from_json(each) for each in found["measured"]}
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        log.warning(
            "[ToMe] %s is not as this version writes it, so nothing is kept in it until it is "
            "deleted: %s: %s",
            path,
            type(error).__name__,
            error,
        )
        return None


def _line_of(key: Mapping[str, Any]) -> str:
    """A key as a line of JSON, the same for equal keys; raises a TypeError if it is no mapping."""
    if not isinstance(key, Mapping):
        raise TypeError("what was measured is not named by a JSON object")
    return json.dumps(key, sort_keys=True)


def _to_json(kept: Kept) -> dict[str, Any]:
    return {
        "date": kept.date,
        "figures": [
            {**each.settings, **_facts(measured)} for each, measured in kept.figures.items()
        ],
        "wishes": [asdict(wish) for wish in kept.wishes],
        "instead": [
            {**each.settings, "others": {name: _facts(found) for name, found in others.items()}}
            for each, others in kept.instead.items()
        ],
    }


def _facts(measured: Measured) -> dict[str, Any]:
    facts = asdict(measured)
    del facts["has_failed"]
    return facts


def _from_json(entry: Mapping[str, Any]) -> Kept:
    return Kept(
        _text(entry["date"]),
        {_candidate(each): _measured(each) for each in entry["figures"]},
        tuple(Wish(_text(each["goal"]), _number(each["amount"])) for each in entry["wishes"]),
        {
            _candidate(each): {
                _text(name): _measured(found) for name, found in each["others"].items()
            }
            # Entries of earlier versions have none.
            for each in entry.get("instead", [])
        },
    )


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    preset = entry["preset"]
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}")
    OPTIONS["ratio"].check(entry["ratio"])
    return Candidate(str(preset), float(entry["ratio"]))


def _measured(entry: Mapping[str, Any]) -> Measured:
    obstacle = entry["obstacle"]
    return Measured(
        _positive(entry["seconds"]),
        _positive(entry["unpatched"]),
        _number(entry["change"]),
        None if obstacle is None else _text(obstacle),
    )


def _text(value: Any) -> str:
    """Return ``value``, or raise a TypeError if it is no text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _number(value: Any) -> float:
    """Return ``value``, or raise a ValueError if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _positive(value: Any) -> float:
    """Return ``value``, or raise a ValueError if it is no finite number above 0."""
    if _number(value) <= 0:
        raise ValueError(f"{value!r} is not above 0")
    return float(value)
