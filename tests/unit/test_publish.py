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
from tools.publish import OWNERS, SETTINGS, open_points

if sys.version_info >= (3, 11):
    import tomllib
else:
    # A dependency of pytest there.
    import tomli as tomllib

ACCELERATORS = {"NVIDIA CUDA", "AMD ROCm", "Intel Arc", "Apple Metal"}
OLDEST = list(RELEASES)[-1]
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_registry_has_all_that_it_shows_and_little_to_load(settings):
    assert sum((ROOT / file).stat().st_size for file in published_files()) < MOST_BYTES
    project, comfy = settings["project"], settings["tool"]["comfy"]
    gpus = [line for line in project["classifiers"] if line.startswith("Environment :: ")]
    assert {line.removeprefix("Environment :: GPU :: ") for line in gpus} == ACCELERATORS
    assert {"DisplayName", "requires-comfyui"} <= comfy.keys()


HOME = "https://github.com/someone/tome-nodes"
FILLED = {
    "Repository": HOME,
    "Issues": f"{HOME}/issues",
    "PublisherId": "someone",
    "Icon": "https://raw.githubusercontent.com/someone/tome-nodes/main/docs/icon.svg",
    "Banner": "https://raw.githubusercontent.com/someone/tome-nodes/main/docs/banner.svg",
}


def filled(given):
    """The settings with what an owner has filled in, in place of their own."""
    text = (ROOT / SETTINGS).read_text(encoding="utf-8")
    for name in OWNERS:
        line = f'{name} = "{given[name]}"' if name in given else f"# {name}"
        text, count = re.subn(rf"(?m)^(# )?{name} = .*$", line, text)
        assert count == 1
    return text


@pytest.mark.parametrize("name", FILLED)
def test_what_the_owner_has_not_filled_in_is_said(name):
    text = filled(FILLED)
    project = tomllib.loads(text)
    places = {**project["project"]["urls"], **project["tool"]["comfy"]}
    assert {key: places[key] for key in OWNERS} == FILLED
    assert open_points(text) == open_points(text, "someone/tome-nodes") == []
    (point,) = open_points(filled({**FILLED, name: "..."}))
    assert point.startswith(f"{name} is not ") and point.endswith(": ...")
    (point,) = open_points(filled({key: FILLED[key] for key in FILLED if key != name}))
    assert point.startswith(f"{name} is missing: ")


def test_a_copy_under_another_name_is_not_published():
    assert open_points(filled(FILLED), "another/tome-nodes") == [
        f"Repository is {HOME}, but another/tome-nodes publishes"
    ]


def test_the_check_before_publishing_says_what_is_open_in_a_line_each():
    command = [sys.executable, "dev.py", "publish", "--check"]
    environment = {name: os.environ[name] for name in os.environ if name != "GITHUB_REPOSITORY"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    points = open_points((ROOT / SETTINGS).read_text(encoding="utf-8"))
    said = "".join(f"\n{point}" for point in points)
    assert done.returncode == bool(points)
    assert done.stderr == (f"\nError: {SETTINGS} is not complete:{said}\n" if points else "")


@pytest.mark.parametrize(("name", "most", "shape"), [("icon", 400, 1), ("banner", 1680, 21 / 9)])
def test_the_registrys_pictures_are_there_and_of_the_size_it_wants(name, most, shape):
    picture = ElementTree.fromstring((ROOT / f"docs/{name}.svg").read_bytes())
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
    *commands, check = re.findall(r"^ +run: (.+)$", workflow, re.MULTILINE)
    assert check == "python3 dev.py publish --check"
    environment = {**os.environ, "GITHUB_REF_NAME": f"v{settings['project']['version']}{added}"}
    codes = [subprocess.call(line, shell=True, cwd=ROOT, env=environment) for line in commands]
    assert codes == [0 if is_published else 1] * 2


PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "web/docs", "benchmarks")
    for page in (ROOT / folder).glob("*.md")
)
FOR_DEVELOPERS = ("benchmarks/", "CONTRIBUTING.md")
"""What published pages may link to although the registry leaves it out, as the README says."""
PUBLISHED = {file.as_posix() for file in published_files()}


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = Path(page.parent, path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        file = target.relative_to(ROOT).as_posix()
        if name in PUBLISHED and target.is_file() and not file.startswith(FOR_DEVELOPERS):
            assert file in PUBLISHED, f"{link} is not in the published pack"


HELP = [name for name in PAGES if name.startswith("web/docs/")]


@pytest.mark.parametrize("name", HELP)
def test_help_pages_link_to_nothing_that_the_editor_does_not_serve(name):
    """It serves what is beside them, and resolves a link by its own address, not by theirs."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    for file in re.findall(r"`(docs/[^`]+)`", text):
        assert file in PUBLISHED


def test_no_page_has_the_address_of_our_own_home():
    """The owner fills it in at one place."""
    ours = re.compile(r"https://[\w./-]*tome-nodes/tome-nodes|repository_owner ==")
    pages = [ROOT / name for name in (*PAGES, ".github/workflows/publish.yml")]
    assert [page for page in pages if ours.search(page.read_text(encoding="utf-8"))] == []


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
def test_a_clone_of_this_folder_is_the_pack_and_little_to_load(tmp_path):
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "tome-nodes"
    command = ["git", "clone", "--depth", "1", ROOT.as_uri(), str(pack)]
    subprocess.run(command, check=True, capture_output=True)
    assert {"__init__.py", "dev.py", "pyproject.toml"} <= {file.name for file in pack.iterdir()}
    # What git keeps of the one version. Some 24 MB of it are weights of the networks that judge.
    packed = sum(file.stat().st_size for file in (pack / ".git").rglob("*") if file.is_file())
    assert packed < 30_000_000
