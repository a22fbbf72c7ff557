"""Token merging for models of pictures and videos: the merge core and its hosts."""

from .pytorch.patch import apply_patch, remove_patch

__all__ = ["apply_patch", "remove_patch"]
