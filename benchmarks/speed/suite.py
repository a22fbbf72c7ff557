"""The tests of kernels, hosts and transformers, on a GPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.environment import ROOT

HOSTS = (
    *("attention", "comfyui", "comfyui_neighbours", "contract", "diffusers"),
    *("diffusers_forecasts", "drop_in", "faults", "host_checks", "kernels_in_models", "ldm"),
    *("presets", "recording", "report", "transformers"),
)
FILES = ("tests/unit/test_kernels.py", *(f"tests/hosts/test_{name}.py" for name in HOSTS))
DRY = ("tests/hosts/test_kernels_in_models.py::test_weighed_attention_launches_two_more_kernels",)


def run(folder: Path | None, minutes: float, is_dry: bool) -> int:
    """Run the tests side by side.

    Args:
        folder: where pytest's report goes, ``gpu-1.xml``; None keeps nothing.
        minutes: after these, the tests are cut off.
        is_dry: whether it only goes through the motions.

    Returns:
        pytest's exit code; 1 if the tests were cut off.
    """
    processes = max(1, min(8, (os.cpu_count() or 2) // 2))
    side_by_side = "-n", str(processes), "--dist", "loadgroup"
    chosen: Sequence[str] = DRY if is_dry else (*side_by_side, *FILES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short"]
    if folder is not None:
        command.append(f"--junitxml={folder.resolve() / 'gpu-1.xml'}")
    try:
        return subprocess.call([*command, *chosen], cwd=ROOT, timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        print(f"cut off after {minutes:g} minutes")
        return 1
