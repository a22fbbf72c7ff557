"""The machine on which a result was taken."""

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def machine(device: str) -> dict[str, Any]:
    """A description of this machine."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    accelerator = torch.cuda.get_device_name() if device == "cuda" else None
    threads = torch.get_num_threads()
    return {
        "description": accelerator or f"{threads} threads of an {processor}, no GPU",
        "processor": processor,
        "threads": threads,
        "accelerator": accelerator,
        "torch": torch.__version__,
        "system": platform.system(),
    }
