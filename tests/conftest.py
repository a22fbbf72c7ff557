"""The real ComfyUI, in this process and as a server."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMFYUI = Path(os.environ.get("COMFYUI_PATH") or ROOT / ".venv" / "ComfyUI")

sys.path.insert(0, str(COMFYUI))

from comfy.cli_args import args  # noqa: E402

from tools.checkpoints import write_checkpoint  # noqa: E402
from tools.server import ComfyServer  # noqa: E402

args.cpu = True
args.use_pytorch_cross_attention = True


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A folder of UNet files, each made when it is first asked for."""
    folder = tmp_path_factory.mktemp("unets")

    def file(family, **options):
        name = "-".join([family, *(str(value) for value in options.values())])
        path = folder / f"{name}.ckpt"
        return path if path.exists() else write_checkpoint(path, family, unet_only=True, **options)

    return file


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A running server with this pack and the checkpoints `sd15.ckpt` and `sdxl.ckpt`."""
    base = tmp_path_factory.mktemp("server")
    models = base / "models" / "checkpoints"
    write_checkpoint(models / "sd15.ckpt", "sd15", levels=1)
    write_checkpoint(models / "sdxl.ckpt", "sdxl")
    with ComfyServer(base) as running:
        yield running


@pytest.fixture(scope="session")
def info(server):
    """The nodes of the server, by class name."""
    return server.get("/object_info")
