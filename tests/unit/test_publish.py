"""What the registry and users read, where its links lead, and when a version is published."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import dev
from tools.environment import RELEASES, ROOT, pinned_comfyui
from tools.pack import published_files

if sys.version_info >= (3, 11):
    import tomllib
else:
    # A dependency of pytest there.
    import tomli as tomllib

RAW = "https://raw.githubusercontent.com/tome-nodes/tome-nodes/main/"
ACCELERATORS = {"NVIDIA CUDA", "AMD ROCm", "Intel Arc", "Apple Metal"}
OLDEST = list(RELEASES)[-1]
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_registry_has_all_that_it_shows_and_little_to_load(settings):
    assert sum((ROOT / file).stat().st_size for file in published_files()) < MOST_BYTES
    project, comfy = settings["project"], settings["tool"]["comfy"]
    assert project["urls"].keys() == {"Homepage", "Documentation", "Repository", "Issues"}
    gpus = [line for line in project["classifiers"] if line.startswith("Environment :: ")]
    assert {line.removeprefix("Environment :: GPU :: ") for line in gpus} == ACCELERATORS
    shown = {"PublisherId", "DisplayName", "Icon", "Banner", "requires-comfyui"}
    assert comfy.keys() == shown


@pytest.mark.parametrize(("name", "most", "shape"), [("Icon", 400, 1), ("Banner", 1680, 21 / 9)])
def test_the_registrys_pictures_are_there_and_of_the_size_it_wants(settings, name, most, shape):
    url = settings["tool"]["comfy"][name]
    assert url.startswith(RAW)
    picture = ElementTree.fromstring((ROOT / url.removeprefix(RAW)).read_bytes())
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = int(picture.get("width")), int(picture.get("height"))
    assert width <= most
    assert width / height == pytest.approx(shape)


def test_the_earliest_front_end_is_that_of_the_earliest_comfyui(settings):
    requirements = pinned_comfyui(OLDEST) / "requirements.txt"
    if not requirements.exists():
        pytest.skip(f"ComfyUI {OLDEST} was not fetched")
    (pinned,) = re.findall(
        r"^comfyui-frontend-package==(\S+)$", requirements.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert settings["project"]["dependencies"] == [f"comfyui-frontend-package>={pinned}"]


def test_the_changelog_begins_with_the_version_that_is_published(settings):
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    version = re.escape(settings["project"]["version"])
    assert re.fullmatch(rf"\[{version}\] - \d{{4}}-\d\d-\d\d", versions[0])


@pytest.mark.skipif(os.name == "nt", reason="runs the commands of a workflow for Linux")
@pytest.mark.parametrize(("added", "is_published"), [("", True), ("1", False)])
def test_only_a_tag_of_the_version_is_published(settings, added, is_published):
    workflow = (ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8")
    commands = re.findall(r"^ +run: (.+)$", workflow, re.MULTILINE)
    environment = {**os.environ, "GITHUB_REF_NAME": f"v{settings['project']['version']}{added}"}
    codes = [subprocess.call(line, shell=True, cwd=ROOT, env=environment) for line in commands]
    assert codes == [0 if is_published else 1] * 2


REPOSITORY = "https://github.com/tome-nodes/tome-nodes/blob/main/"
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "web/docs", "benchmarks")
    for page in (ROOT / folder).glob("*.md")
)
UNPUBLISHED = tuple(
    line.strip("/")
    for line in (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    if line.startswith("/")
)


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.removeprefix(REPOSITORY).partition("#")
        if path.startswith("https://"):
            continue
        folder = ROOT if link.startswith(REPOSITORY) else page.parent
        target = Path(folder, path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        if not (name.startswith(UNPUBLISHED) or link.startswith(REPOSITORY)):
            file = target.relative_to(ROOT).as_posix()
            assert not file.startswith(UNPUBLISHED), f"{link} is not in the published pack"


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_ours_is_one_that_there_is(name):
    """What they do has tests of its own; docs/http.md and docs/python.md are run as they stand."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for command in re.findall(r"(?<![\w/.])dev\.py ([^`#\n]+)", text):
        words = shlex.split(command.split("\\")[0])
        arguments, rest = dev._parser().parse_known_args([word for word in words if word != "..."])
        assert arguments.command, command
        if arguments.command in ("demo", "lint"):
            assert not rest, command


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="this is no clone"
)
def test_the_command_that_installs_the_pack_does(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^git clone .*$", text, re.MULTILINE)
    origin = "https://github.com/tome-nodes/tome-nodes "
    assert origin in command
    local = shlex.split(command.replace(origin, f"{shlex.quote(ROOT.as_uri())} "))
    subprocess.run(local, cwd=tmp_path, check=True, capture_output=True)
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "tome-nodes"
    assert {"__init__.py", "dev.py", "pyproject.toml"} <= {file.name for file in pack.iterdir()}
    # What git keeps of the one version.
    packed = sum(file.stat().st_size for file in (pack / ".git").rglob("*") if file.is_file())
    assert packed < 20_000_000
