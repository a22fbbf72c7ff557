"""The record of a run: its time limit, and its JSON, which is always up to date."""

import gc
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import origin
from benchmarks.speed import figures


class Record:
    """Measurements of one command, kept as they are made in ``result``, the content of a file."""

    def __init__(
        self,
        name: str,
        command: str,
        folder: Path | None,
        minutes: float = math.inf,
        device: str = "cpu",
        is_dry: bool = False,
    ):
        """Begin a run.

        Args:
            name: name of the file, without ``.json``.
            command: command of ``dev.py``; its arguments are added.
            folder: where the file goes; None keeps nothing.
            minutes: after this time, nothing more starts.
            device: ``cpu`` or ``cuda``.
            is_dry: whether it only goes through the motions.
        """
        self.name, self.folder, self.is_dry = name, folder, is_dry
        self.device = torch.device(device)
        self._end = time.monotonic() + 60 * minutes
        self.result: dict[str, Any] = {
            **origin(device, command),
            "gpu": gpu() if device == "cuda" else None,
            "failed": {},
            "left_out": [],
        }
        self.write()

    @property
    def left(self) -> float:
        """Seconds until the limit, negative after it."""
        return self._end - time.monotonic()

    def compare(
        self, case: str, seconds: float, measure: Callable[[], Mapping[str, figures.Row]]
    ) -> None:
        """Make a comparison, print its table, and keep the file up to date.

        Args:
            case: what is compared, in words.
            seconds: how long it may take; it is skipped if less time is left.
            measure: makes the rows of a :data:`benchmarks.speed.figures.Comparison`. If it raises
                an error, that is recorded, and other comparisons go on.
        """
        if self.left < seconds:
            self.result["left_out"].append(case)
            say(f"left out: {case}")
            self.write()
            return
        began = time.monotonic()
        try:
            comparison = {"case": case, "rows": measure()}
        except Exception as error:
            self.fail(case, error)
        else:
            self.result.setdefault("comparisons", []).append(comparison)
            say("\n" + figures.table(comparison) + "\n")
        say(f"{case}: {time.monotonic() - began:.1f} s, {self.left:.0f} s left")
        self.write()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def fail(self, name: str, error: Exception) -> None:
        """Record why something failed."""
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        self.result["failed"][name] = why
        say(f"FAILED: {name}: {why}")

    def pace(self, least: int, seconds: float) -> Callable[[int], bool]:
        """A function for :func:`benchmarks.rounds.interleaved`: is there no time for more rounds?

        Args:
            least: the least number of rounds, if the limit allows it; a dry run makes one.
            seconds: how long further rounds may take together.
        """
        began = time.monotonic()

        def after_round(done: int) -> bool:
            taken = time.monotonic() - began
            return self.is_dry or self.left < taken / done or (done >= least and taken > seconds)

        return after_round

    def write(self) -> None:
        """Write the file."""
        self._write(".json", json.dumps(self.result, indent=1) + "\n")

    def write_page(self, parts: Sequence[str]) -> None:
        """Write paragraphs as a page beside the file."""
        self._write(".md", figures.joined(parts))

    def _write(self, suffix: str, text: str) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.name}{suffix}"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)

    def finish(self, goals: Mapping[str, object] | None = None) -> int:
        """Print the last line; the exit code is 1 if a measurement failed.

        ``goals`` are the figures in it, by default how many times faster the presets are.
        """
        goals = figures.gains(self.result.get("comparisons", ())) if goals is None else goals
        counts = {"failed": len(self.result["failed"]), "left_out": len(self.result["left_out"])}
        self.result["summary"] = "summary: " + " ".join(
            f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in {**goals, **counts}.items()
        )
        self.write()
        say(self.result["summary"])
        return int(bool(self.result["failed"]))


def gpu() -> dict[str, Any]:
    """What the times depend on besides the name of the GPU."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
    }


def say(text: str) -> None:
    """Print without buffering, so that a run that is cut off shows how far it got."""
    print(text, flush=True)
