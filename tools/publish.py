"""What is still open before the pack can be published."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

from tools.environment import ROOT
from tools.errors import ToolError

SETTINGS = "pyproject.toml"
_ADDRESS = r"https://\S+"
OWNERS = {
    "Repository": ("the address of the pack's home", _ADDRESS),
    "Issues": ("the address where users report faults", _ADDRESS),
    "PublisherId": ("the name of the publisher in the registry", r"[\w-]+"),
    "Icon": ("the address of docs/icon.svg as it is", rf"{_ADDRESS}/docs/icon\.svg"),
    "Banner": ("the address of docs/banner.svg as it is", rf"{_ADDRESS}/docs/banner\.svg"),
}
"""What only the owner can fill in, in words and as a pattern."""


def main(arguments: Sequence[str]) -> None:
    """Run the command line.

    Raises:
        ToolError: something is still open.
    """
    parser = argparse.ArgumentParser(prog="dev.py publish", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", required=True)
    parser.parse_args(arguments)
    text = (ROOT / SETTINGS).read_text(encoding="utf-8")
    if points := open_points(text, os.environ.get("GITHUB_REPOSITORY")):
        raise ToolError("\n".join([f"{SETTINGS} is not complete:", *points]))
    print(f"{SETTINGS} is complete.")


def open_points(text: str, repository: str | None = None) -> list[str]:
    """What is open in a ``pyproject.toml``, a line each.

    ``repository`` is the owner and the name of the repository on GitHub that publishes, None if it
    is not known.
    """
    # Python 3.10 cannot read TOML.
    given = dict(re.findall(r'^(\w+) = "(.*)"$', text, re.MULTILINE))
    points = [
        f"{name} is {'not ' if name in given else 'missing: '}{what}{_shown(given.get(name))}"
        for name, (what, pattern) in OWNERS.items()
        if re.fullmatch(pattern, given.get(name, "")) is None
    ]
    home = given.get("Repository")
    if repository is not None and home is not None and home != f"https://github.com/{repository}":
        points.append(f"Repository is {home}, but {repository} publishes")
    return points


def _shown(value: str | None) -> str:
    return "" if value is None else f": {value}"
