"""The pack as users get it: the files that the registry publishes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pathspec import GitIgnoreSpec

from tools.environment import ROOT


def published_files() -> list[Path]:
    """The files of the working tree that would be published, relative to the root.

    The registry's client publishes what git tracks except what `.comfyignore` names; here files
    that are about to be tracked count as well.
    """
    # A folder, or in a work tree beside the repository a file.
    rules = [".git"]
    for name in (".gitignore", ".comfyignore"):
        rules += (ROOT / name).read_text(encoding="utf-8").splitlines()
    ignored = GitIgnoreSpec.from_lines(rules)
    published = []
    for folder, subfolders, names in os.walk(ROOT):
        here = Path(folder).relative_to(ROOT)
        subfolders[:] = sorted(
            name for name in subfolders if not ignored.match_file(f"{(here / name).as_posix()}/")
        )
        files = (here / name for name in sorted(names))
        published += [file for file in files if not ignored.match_file(file.as_posix())]
    return published


def copy_pack(destination: Path) -> None:
    """Make `destination` a copy of the published pack only."""
    if destination.exists():
        shutil.rmtree(destination)
    for file in published_files():
        target = destination / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target)
