"""Run all cells of the table of compatibility and write it, on the CPU."""

import sys

import comfyui_in_process  # noqa: F401

from benchmarks.host import use_cpu

use_cpu()

from .table import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
