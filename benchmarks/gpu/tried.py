"""What the probe finds in one measurement, without what it found on this machine before."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.record import Record
from tome_nodes.comfyui import attachment
from tome_nodes.ops.autotune import Case, Probed
from tome_nodes.ops.probe import Probe


@dataclass
class _Store:
    entries: list[dict[str, Any]] = field(default_factory=list)

    def read(self, device: torch.device, case: Case, default: str) -> Probed | None:
        return None

    def keep(self, device: torch.device, case: Case, probed: Probed) -> None:
        self.entries.append(
            {
                "case": " ".join(map(str, case)),
                "default": probed.default,
                "taken": probed.way,
                "seconds": dict(probed.seconds),
            }
        )


class _DryProbe(Probe):
    """Of a CPU, too."""

    def is_for(self, device: torch.device) -> bool:
        return True


@contextmanager
def tried(record: Record) -> Iterator[list[dict[str, Any]]]:
    """Models patched in it have a probe of their own; yields what that finds, case by case."""
    store = _Store()
    probe = (_DryProbe if record.is_dry else Probe)(store)
    with patch.object(attachment, "probe", lambda: probe):
        yield store.entries
