"""Makes ComfyUI importable; modules that import its parts import this one first."""

import sys

from tools.environment import comfyui_directory

if str(comfyui_directory()) not in sys.path:
    sys.path.insert(0, str(comfyui_directory()))


def use_cpu() -> None:
    """Have ComfyUI run on the CPU, with PyTorch's attention; call it before its parts load."""
    use("cpu")


def use(device: str) -> None:
    """The same on ``cpu`` or ``cuda``."""
    from comfy.cli_args import args

    args.cpu = device == "cpu"
    args.use_pytorch_cross_attention = True
