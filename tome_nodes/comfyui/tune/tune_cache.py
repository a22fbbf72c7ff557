"""Keep what ToMe Tune measured in a JSON file in ComfyUI's user folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...settings.config import OPTIONS
from ...settings.presets import PRESETS
from ...tuning.search import Candidate, Figures, Measured, Wish
from ..json_cache import UserFile, line_of, number, positive, text


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
        text(entry["date"]),
        {_candidate(each): _measured(each) for each in entry["figures"]},
        tuple(Wish(text(each["goal"]), number(each["amount"])) for each in entry["wishes"]),
        {
            _candidate(each): {
                text(name): _measured(found) for name, found in each["others"].items()
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
        positive(entry["seconds"]),
        positive(entry["unpatched"]),
        number(entry["change"]),
        None if obstacle is None else text(obstacle),
    )


FILE = UserFile(
    "tune.json",
    "ToMe Tune 1",
    "What ToMe Tune measured on this machine. Delete this file to forget it.",
    500,
    _to_json,
    _from_json,
)


def read(key: Mapping[str, Any]) -> Kept:
    """What is kept for a kind of sampling run; empty if nothing is, or if the file is unusable."""
    return (FILE.read() or {}).get(line_of(key), Kept())


def write(key: Mapping[str, Any], kept: Kept) -> None:
    """Keep what was measured for a kind of sampling run, in place of an earlier entry."""
    FILE.keep(key, kept)
