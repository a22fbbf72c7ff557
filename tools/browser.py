"""Find or install a browser for ComfyUI's front end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from tools.environment import VENV
from tools.steps import SetupError, run, succeeds

PLAYWRIGHT_BROWSERS = VENV / "browsers"
PLAYWRIGHT_NAMES = ("chrome", "chrome.exe", "Chromium", "Google Chrome for Testing")

COMMANDS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    "msedge",
)
LOCATIONS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)


def find_browser() -> Path | None:
    """Return a Chromium or Chrome that starts: the system's, else Playwright's, else None."""
    on_path = [shutil.which(command) for command in COMMANDS]
    files = (file for file in PLAYWRIGHT_BROWSERS.rglob("*") if file.name in PLAYWRIGHT_NAMES)
    candidates = (Path(name) for name in chain(on_path, LOCATIONS, files) if name)
    return next(filter(_starts, candidates), None)


def ensure_browser(python: Path) -> Path:
    """Return a browser that starts, and install one first if there is none.

    Args:
        python: an interpreter that has Playwright.
    """
    if browser := find_browser():
        return browser
    failures = []
    for step, command in _installations(python):
        try:
            run(step, command, {"PLAYWRIGHT_BROWSERS_PATH": str(PLAYWRIGHT_BROWSERS)})
        except SetupError as failure:
            failures.append(str(failure))
        else:
            if browser := find_browser():
                return browser
    raise SetupError(
        "\n\n".join(failures)
        + "\n\nThe tests drive ComfyUI's front end, and no Chromium or Chrome "
        "that starts was found. Install one so that it is on PATH, and run this again."
    )


def _installations(python: Path) -> list[tuple[str, Sequence[str | Path]]]:
    steps: list[tuple[str, Sequence[str | Path]]] = [
        ("Installing Playwright's Chromium", [python, "-m", "playwright", "install", "chromium"])
    ]
    if shutil.which("apt-get") and os.geteuid() == 0:
        install = ["apt-get", "-q", "-y", "install", "--no-install-recommends", "chromium"]
        steps += [
            ("Refreshing the list of system packages", ["apt-get", "-q", "update"]),
            ("Installing the system's Chromium", install),
        ]
    return steps


def _starts(browser: Path) -> bool:
    if not browser.is_file():
        return False
    # Some distributions have a placeholder of this name that only says how to install the real one.
    # On Windows, --version would open a window.
    return os.name == "nt" or succeeds([browser, "--version"])
