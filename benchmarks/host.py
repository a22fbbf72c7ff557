"""Makes ComfyUI and the tiny models importable; import this before any of their parts."""

import sys

from tools.environment import ROOT, comfyui_directory

for folder in (ROOT / "tests", comfyui_directory()):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def use_cpu() -> None:
    """Have ComfyUI run on the CPU, with PyTorch's attention; call it before its parts load."""
    use("cpu")


def use(device: str) -> None:
    """The same on ``cpu`` or ``cuda``."""
    from comfy.cli_args import args

    args.cpu = device == "cpu"
    args.use_pytorch_cross_attention = True
