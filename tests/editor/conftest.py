"""Tests of the workflows and translations, and of the pack in the real front end."""

import comfyui_in_process  # noqa: F401
