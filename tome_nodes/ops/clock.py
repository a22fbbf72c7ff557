"""Time on the device that a model runs on."""

import time
from typing import Any

import torch


def has_nothing_to_do(device: torch.device) -> bool:
    """Whether a GPU (CUDA or ROCm) has finished all queued work."""
    return torch.cuda.current_stream(device).query()


class Clock:
    """Measures time on a device without making it wait.

    Attributes:
        can_measure: whether it can measure on this device: a CPU, CUDA or ROCm.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._has_events = device.type == "cuda"
        self.can_measure = self._has_events or device.type == "cpu"

    def now(self) -> Any:
        """The present moment; on a GPU, the moment at which all work queued so far is done."""
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self._has_events:
            torch.cuda.synchronize(self._device)

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to another, both in the past."""
        return start.elapsed_time(end) / 1000 if self._has_events else end - start
