"""Take to a machine without a network what its PyTorch lacks: ComfyUI's code, and wheels.

Such a machine is lent for minutes, so nothing is fetched or built there. The folder is made here by
:func:`pack`, and :func:`unpack` unpacks it there. This uses only the standard library.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tools.environment import (
    LDM,
    LIGHT_REQUIREMENTS,
    REQUIREMENTS,
    ROOT,
    comfyui_directory,
    constraints_of,
    interpreter,
    name_of,
)
from tools.errors import ToolError
from tools.steps import run, timed

ARCHIVE = "comfyui.tar.gz"

LEFT_OUT = (
    *("api_server", "app", "blueprints", "comfy_api_nodes", "custom_nodes", "input", "models"),
    *("output", "script_examples", "temp", "tests", "tests-unit", "user", "venv"),
)
"""Folders of ComfyUI that no measurement needs, besides any that starts with a dot."""

NEEDED = (
    *("comfy-aimdo", "diffusers", "stable-diffusion-sdkit", "tomesd", "torchsde"),
    *("trampoline", "accelerate", "einops", "execnet", "hypothesis", "iniconfig", "numpy"),
    *("omegaconf", "packaging", "pillow", "pluggy", "psutil", "pygments", "pytest"),
    *("pytest-xdist", "pyyaml", "regex", "requests", "safetensors", "scipy"),
    *("sentencepiece", "sortedcontainers"),
    *("tokenizers", "torchaudio", "torchvision", "tqdm", "transformers", "huggingface-hub"),
    *("certifi", "charset-normalizer", "idna", "urllib3", "importlib-metadata", "zipp"),
    *("anyio", "h11", "httpcore2", "httpx2", "truststore"),
)
"""What ComfyUI, the tests and the measurements import beside PyTorch and its own dependencies.

PyAV is as large as half of them, so ``tools/without_video`` takes its place.
"""

PURE = ("comfy-kitchen",)
"""The same, without their own kernels, which are larger than the rest together."""

_PLATFORMS = (
    *(f"manylinux_{version}_x86_64" for version in ("2_28", "2_27", "2_24", "2_17", "2_12")),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)


def pack(folder: Path, torch: str, has: Iterable[str]) -> None:
    """Fill a folder for Python 3.12 on Linux and x86-64.

    Args:
        folder: is made; wheels that are in it stay.
        torch: the PyTorch of the other machine, one of `TORCHES`.
        has: packages that the other machine has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with timed("Packing ComfyUI"):
        pack_comfyui(comfyui_directory(), folder / ARCHIVE)
    present = {name_of(package) for package in has}
    pinned = _pinned(torch)
    for names, platforms in ((NEEDED, _PLATFORMS), (PURE, ("any",))):
        wanted = [f"{name}=={pinned[name]}" for name in names if name not in present]
        if wanted:
            command: list[str | Path] = [
                *(interpreter(), "-m", "pip", "download", "--disable-pip-version-check"),
                *("--no-deps", "--only-binary=:all:", "--python-version=3.12", f"--dest={folder}"),
                *(f"--platform={platform}" for platform in platforms),
            ]
            run(f"Fetching {len(wanted)} wheels", [*command, *wanted])
    sizes = [file.stat().st_size for file in folder.iterdir()]
    print(f"{folder}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB")


def pack_comfyui(comfyui: Path, archive: Path) -> None:
    """Write the code of a ComfyUI to an archive."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(member.name).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if is_hidden or "__pycache__" in parts or (parts and parts[0] in LEFT_OUT):
            return None
        return member

    with tarfile.open(archive, "w:gz") as file:
        for part in sorted(comfyui.iterdir()):
            file.add(part, part.name, filter=kept)


def unpack(folder: Path, scratch: Path) -> dict[str, str]:
    """Unpack a folder that :func:`pack` has filled.

    Args:
        folder: as it was carried.
        scratch: is filled.

    Returns:
        Environment variables under which this machine's Python runs the tests and measurements.

    Raises:
        ToolError: the folder has no ComfyUI.
    """
    if not (folder / ARCHIVE).is_file():
        raise ToolError(f"{folder} has no {ARCHIVE}; `python3 dev.py gpu pack` makes it")
    comfyui, packages = scratch / "ComfyUI", scratch / "packages"
    with timed("Unpacking ComfyUI"), tarfile.open(folder / ARCHIVE) as file:
        file.extractall(comfyui, filter="data")
    # Its own start makes these.
    for name in ("input", "models", "output", "custom_nodes"):
        (comfyui / name).mkdir(exist_ok=True)
    wheels = sorted(folder.glob("*.whl"))
    if wheels:
        command: list[str | Path] = [
            *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-index"),
            *("--no-deps", "--no-compile", "--no-cache-dir", f"--target={packages}"),
        ]
        run(f"Installing {len(wheels)} wheels", [*command, *wheels])
    path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    if find_spec("av") is None:
        path.append(str(ROOT / "tools" / "without_video"))
    return {"COMFYUI_PATH": str(comfyui), "PYTHONPATH": os.pathsep.join(path)}


def _pinned(torch: str) -> dict[str, str]:
    texts = [file.read_text(encoding="utf-8") for file in (LIGHT_REQUIREMENTS, REQUIREMENTS)]
    lines = "\n".join([*texts, LDM, *constraints_of(torch)])
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", lines, re.MULTILINE)
    return {name_of(name): version for name, version in pins}
