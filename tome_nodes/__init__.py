"""Token merging for picture and video models, in ComfyUI and in Python."""

from .python.patch import apply_patch, remove_patch

__all__ = ["apply_patch", "remove_patch"]
