"""Where a result comes from: the command, the machine, the date."""

import platform
import sys
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch


def origin(device: str, command: str) -> dict[str, Any]:
    """What each file of results begins with.

    Args:
        device: what was measured, ``cpu`` or ``cuda``.
        command: the part of the command that chose it, such as ``bench --picture``; further
            arguments are added.
    """
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    threads = torch.get_num_threads()
    description = f"{threads} thread{'s' * (threads > 1)} of an {processor}, no GPU"
    if device == "cuda":
        description = torch.cuda.get_device_name()
    return {
        "command": " ".join(["python3 dev.py", command, *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": {"description": description, "torch": torch.__version__},
    }
