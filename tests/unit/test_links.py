"""Links and pictures of the pages, in the repository and in the published pack."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import dev
from tools.environment import ROOT

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


def is_published(path):
    return not path.relative_to(ROOT).as_posix().startswith(UNPUBLISHED)


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
        if is_published(page) and not link.startswith(REPOSITORY):
            assert is_published(target), f"{link} is not in the published pack"


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 1000


def test_the_glossary_has_no_more_words_than_it_says():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| \*\*", text, re.MULTILINE)) == 12


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_ours_is_one_that_there_is(name):
    """What they do has tests of its own; docs/http.md and docs/python.md are run as they stand."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for command in re.findall(r"(?<![\w/.])dev\.py ([^`#\n]+)", text):
        words = shlex.split(command.split("\\")[0])
        arguments, rest = dev._parser().parse_known_args([each for each in words if each != "..."])
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
