"""Put the real ComfyUI on the path and tell it how to run, before anything imports it.

Importing this is enough. The tests that need ComfyUI do it in the conftest of their folder, and
what runs without pytest in its ``__main__``.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.environment import comfyui_directory

sys.path.insert(0, str(comfyui_directory()))

# In ComfyUI 0.18.2, the nodes put the folder `comfy` in front of the path, and it has a module of
# this name. The host's own start imports the right one before them, too.
import utils  # noqa: F401
from comfy.cli_args import args

args.cpu = not torch.cuda.is_available()
# On a GPU, too, what is compared is in single precision.
args.fp32_unet = not args.cpu
args.use_pytorch_cross_attention = True
