"""What the probe finds in one measurement, ignoring what it found on this machine before."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.speed.record import Record
from tome_nodes.comfyui import attachment
from tome_nodes.ops.autotune import Autotune, Case, Choice


@dataclass
class _Store:
    entries: list[dict[str, Any]] = field(default_factory=list)

    def read(self, device: torch.device, case: Case, default: str) -> Choice | None:
        return None

    def keep(self, device: torch.device, case: Case, choice: Choice) -> None:
        self.entries.append(
            {
                "case": " ".join(map(str, case)),
                "default": choice.default,
                "taken": choice.variant,
                "seconds": dict(choice.seconds),
            }
        )


class _DryProbe(Autotune):
    """A probe that also works on a CPU."""

    def is_for(self, device: torch.device) -> bool:
        return True


@contextmanager
def tried(record: Record) -> Iterator[list[dict[str, Any]]]:
    """Give models that are patched meanwhile a new probe; yields what it finds, case by case."""
    store = _Store()
    probe = (_DryProbe if record.is_dry else Autotune)(store)
    with patch.object(attachment, "autotune", lambda: probe):
        yield store.entries
