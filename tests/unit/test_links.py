"""Links and pictures of the pages, in the repository and in the published pack."""

import re
from pathlib import Path

import pytest

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
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
