"""JSON files of this pack in ComfyUI's user folder.

A file that is broken or has another format is neither used nor overwritten.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

import folder_paths

from .file_lock import locked

log = logging.getLogger("tome_nodes")

Entry = TypeVar("Entry")


class UserFile(Generic[Entry]):
    """A JSON file of what was measured on this machine: entries by key, which is a JSON object.

    Attributes:
        path: the path of the file, which need not exist.
    """

    def __init__(
        self,
        name: str,
        format: str,
        about: str,
        most: int,
        to_json: Callable[[Entry], dict[str, Any]],
        from_json: Callable[[dict[str, Any]], Entry],
    ):
        """Describe a file.

        Args:
            name: the name of the file.
            format: the format that the file must name; a file with another format is not used.
            about: a sentence in the file, for people who open it.
            most: the largest number of entries; the oldest are dropped.
            to_json: turns an entry into JSON.
            from_json: turns JSON back into an entry; raises, for example, a ValueError if it is
                not valid.
        """
        self._name = name
        self._format = format
        self._about = about
        self._most = most
        self._to_json = to_json
        self._from_json = from_json

    @property
    def path(self) -> Path:
        return Path(folder_paths.get_system_user_directory("tome_nodes")) / self._name

    def read(self) -> dict[str, Entry] | None:
        """All entries by the :func:`line_of` of their keys; empty if there is no file.

        None, and a warning in the log, if the file cannot be used.
        """
        # Windows cannot replace a file while another process reads it.
        with locked(self.path):
            return self._read()

    def _read(self) -> dict[str, Entry] | None:
        path = self.path
        try:
            content = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("[ToMe] %s cannot be read, so nothing is kept in it: %s", path, error)
            return None
        try:
            found = json.loads(content)
            if found["format"] != self._format:
                raise ValueError(f"its format is {found['format']!r}")
            return {line_of(each["of"]): self._from_json(each) for each in found["measured"]}
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

    def keep(self, key: Mapping[str, Any], entry: Entry) -> None:
        """Write an entry, in place of one with the same key; log a warning if that fails."""
        path = self.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _warn(error)
            return
        # Another ComfyUI may use the same folder.
        with locked(path):
            entries = self._read()
            if entries is None:
                return
            entries.pop(line_of(key), None)
            entries[line_of(key)] = entry
            content = {
                "format": self._format,
                "about": self._about,
                "measured": [
                    {"of": json.loads(line), **self._to_json(each)}
                    for line, each in list(entries.items())[-self._most :]
                ],
            }
            document = json.dumps(content, indent=1, allow_nan=False) + "\n"
            # Replacing the file at once keeps it whole, even for readers without a lock.
            draft = path.with_suffix(f".{uuid4().hex}.draft")
            try:
                draft.write_text(document, encoding="utf-8")
                draft.replace(path)
            except OSError as error:
                _warn(error)
                with suppress(OSError):
                    draft.unlink(missing_ok=True)


def _warn(error: OSError) -> None:
    log.warning("[ToMe] what was measured is not kept: %s", error)


def line_of(key: Mapping[str, Any]) -> str:
    """A key as a line of JSON, the same for equal keys; raises a TypeError if it is no mapping."""
    if not isinstance(key, Mapping):
        raise TypeError("what was measured is not named by a JSON object")
    return json.dumps(key, sort_keys=True)


def text(value: Any) -> str:
    """Return ``value``, or raise a TypeError if it is no text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def number(value: Any) -> float:
    """Return ``value``, or raise a ValueError if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def positive(value: Any) -> float:
    """Return ``value``, or raise a ValueError if it is no finite number above 0."""
    if number(value) <= 0:
        raise ValueError(f"{value!r} is not above 0")
    return float(value)
