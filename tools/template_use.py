"""What share of the use of ComfyUI's templates the pack serves.

The newest template index on PyPI counts the uses of each template, and comes with their workflows.
The files of models that a workflow loads say which diffusion models it runs. Left out are templates
for sound, text and shapes, and those that load no model that makes pictures, such as API nodes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tools.environment import PYTHON, ROOT
from tools.errors import ToolError
from tools.families import FATES, Family, family_of, fate_of
from tools.generate import table
from tools.steps import run

PACKAGE = "comfyui-workflow-templates-json"
RESULT = ROOT / "benchmarks" / "results" / "template-use.md"

NO_PICTURE = ("audio", "3d", "llm")
"""Types of categories that are left out."""

MODEL_FOLDERS = ("checkpoints", "diffusion_models")

Fate = Callable[[Family], str]
"""Returns what the pack does with a family: a key of FATES."""

Use = tuple[Family, int]
"""The family of the diffusion model that a template runs, and how often that was used."""


def models_of(workflow: Any) -> Iterator[str]:
    """The files of the models that a workflow, or a part of one, loads."""
    if isinstance(workflow, dict):
        if workflow.get("directory") in MODEL_FOLDERS:
            yield workflow["name"]
        workflow = list(workflow.values())
    if isinstance(workflow, list):
        for part in workflow:
            yield from models_of(part)


def uses_of(
    index: Iterable[Mapping[str, Any]], workflows: Mapping[str, Any], fate: Fate
) -> Iterator[Use]:
    """The use of each template that counts. Of several families, the one served least counts.

    Args:
        index: the categories, each with its ``type`` and ``templates``.
        workflows: by the names of the templates.
        fate: what the pack does with a family.
    """
    worst_last = list(FATES)
    for category in index:
        for template in category["templates"]:
            found = {family_of(file) for file in models_of(workflows.get(template["name"]))}
            families = sorted(filter(None, found), key=lambda each: each.name)
            if families and category["type"] not in NO_PICTURE:
                family = max(families, key=lambda each: worst_last.index(fate(each)))
                yield family, template.get("usage", 0)


def shares_of(uses: Iterable[Use], fate: Fate) -> dict[str, float]:
    """The share of use of each key of FATES.

    Raises:
        ToolError: nothing that counts was used.
    """
    counts = dict.fromkeys(FATES, 0)
    for family, count in uses:
        counts[fate(family)] += count
    if not any(counts.values()):
        raise ToolError("The index counts no use of a template with an open model of pictures.")
    return {name: count / sum(counts.values()) for name, count in counts.items()}


def page(version: str, uses: Sequence[Use], fate: Fate) -> str:
    """The tables in Markdown, and a last line with the shares."""
    shares = shares_of(uses, fate)
    served = shares["known"] + shares["asked"]
    total = sum(count for _, count in uses)
    by_family: Counter[Family] = Counter()
    for family, count in uses:
        by_family[family] += count
    parts = [
        "# Template use: `python3 dev.py templates`",
        f"`{PACKAGE}` {version}, {date.today()}: {total:,} uses of {len(uses)} templates with "
        f"open models of pictures and video. Served, which is known or asked: {_percent(served)}. "
        f"With what nobody has tried: {_percent(served + shares['untried'])}.",
        table(
            ("", "in the pack", "share"),
            ((name, FATES[name], _percent(share)) for name, share in shares.items()),
        ),
        table(
            ("family", "uses", "share", "in the pack"),
            (
                (family.name, f"{count:,}", _percent(count / total), fate(family))
                for family, count in by_family.most_common()
            ),
        ),
        "summary: " + " ".join(f"{k}={v:.3f}" for k, v in ({"served": served} | shares).items()),
    ]
    return "\n\n".join(parts) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def fetch() -> tuple[str, list[Any], dict[str, Any]]:
    """Fetch the newest package: its version, the index, and the workflows by name."""
    pip = (PYTHON, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps")
    with tempfile.TemporaryDirectory() as folder:
        run("Fetching the template index", [*pip, f"--dest={folder}", PACKAGE])
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            files = {
                Path(name).stem: json.loads(package.read(name))
                for name in package.namelist()
                if re.fullmatch(r"\w+/templates/[^/]+\.json", name)
            }
        version = wheel.name.split("-")[1]
    if "index" not in files:
        raise ToolError(f"{PACKAGE} {version} has no templates/index.json.")
    return version, files["index"], files


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="dev.py templates", description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    from benchmarks.host import use_cpu

    use_cpu()
    try:
        version, index, workflows = fetch()
        text = page(version, [*uses_of(index, workflows, fate_of)], fate_of)
    except ToolError as error:
        print(f"\nError: {error}", file=sys.stderr)
        return 1
    if arguments.save:
        RESULT.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
