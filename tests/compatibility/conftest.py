"""The tests of this folder run on ComfyUI."""

import comfyui_in_process  # noqa: F401
