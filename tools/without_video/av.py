"""Stands where PyAV is not: ComfyUI imports its names, and only video files need what they do.

PyAV is at https://github.com/PyAV-Org/PyAV; its wheel is too large to be carried.
"""

import sys
from typing import Any
from unittest.mock import MagicMock

PARTS = ("codec", "container", "error", "subtitles", "subtitles.stream", "video")
sys.modules |= {f"av.{name}": MagicMock() for name in (*PARTS, "video.reformatter")}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
