"""A browser for ComfyUI's front end: the system's, else Playwright's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tools.environment import VENV
from tools.steps import SetupError, run, succeeds

PLAYWRIGHT = {"PLAYWRIGHT_BROWSERS_PATH": str(VENV / "browsers")}
"""Environment variables under which Playwright installs and finds its own Chromium."""

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def system_browser() -> str | None:
    """A Chromium or Chrome on PATH that starts, None if there is none."""
    # Some distributions have a placeholder of this name that only says how to install the real one.
    found = filter(None, map(shutil.which, COMMANDS))
    return next((browser for browser in found if succeeds([browser, "--version"])), None)


def ensure_browser(python: Path) -> None:
    """Install a browser if there is none.

    Args:
        python: an interpreter that has Playwright.
    """
    if system_browser():
        return
    try:
        # It is quick if it is installed.
        run(
            "Installing Playwright's Chromium",
            [python, "-m", "playwright", "install", "chromium"],
            PLAYWRIGHT,
        )
    except SetupError:
        if not (shutil.which("apt-get") and os.geteuid() == 0):
            raise
        # Where Playwright's downloads cannot be reached, the system's packages may be.
        run("Refreshing the list of system packages", ["apt-get", "-q", "update"])
        apt = ["apt-get", "-q", "-y", "install", "--no-install-recommends", "chromium"]
        run("Installing the system's Chromium", apt)
