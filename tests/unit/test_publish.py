"""What the registry reads, and when a version is published."""

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

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


def test_the_registry_has_all_that_it_shows(settings):
    project, comfy = settings["project"], settings["tool"]["comfy"]
    assert project["urls"].keys() == {"Homepage", "Documentation", "Repository", "Issues"}
    gpus = [each for each in project["classifiers"] if each.startswith("Environment :: ")]
    assert {each.removeprefix("Environment :: GPU :: ") for each in gpus} == ACCELERATORS
    assert comfy.keys() == {
        *("PublisherId", "DisplayName", "Icon", "Banner", "requires-comfyui"),
    }


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
    assert (
        re.fullmatch(r"\[(.+)\] - \d{4}-\d\d-\d\d", versions[0])[1]
        == (settings["project"]["version"])
    )


@pytest.mark.skipif(os.name == "nt", reason="runs the commands of a workflow for Linux")
@pytest.mark.parametrize(("added", "is_published"), [("", True), ("1", False)])
def test_only_a_tag_of_the_version_is_published(settings, added, is_published):
    workflow = (ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8")
    commands = re.findall(r"^ +run: (.+)$", workflow, re.MULTILINE)
    environment = {**os.environ, "GITHUB_REF_NAME": f"v{settings['project']['version']}{added}"}
    codes = [subprocess.call(each, shell=True, cwd=ROOT, env=environment) for each in commands]
    assert codes == [0 if is_published else 1] * 2


def test_what_comfyui_loads_is_small():
    assert sum((ROOT / file).stat().st_size for file in published_files()) < MOST_BYTES
