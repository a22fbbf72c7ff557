"""Tests of the workflows and translations, and of the pack in the real front end."""

import comfyui_in_process  # noqa: F401


def pytest_collection_modifyitems(items):
    """Let tests that share an editor follow each other, as one is open at a time."""
    items.sort(key=_editor_of)


def _editor_of(item):
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return str((parameters["front_end"], parameters["editor"])) if "editor" in parameters else ""
