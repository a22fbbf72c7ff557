"""Write the texts of the nodes and the figures of the pages to where users read them.

    python3 dev.py generate
    python3 dev.py generate --check
    python3 dev.py generate --translated ko

It writes `locales/en/nodeDefs.json`, the README's plot, and what is between the markers of the
pages: lists of the help pages from `tome_nodes/comfyui/node_texts.py`, and tables that
`tools/figures.py` makes from the results of benchmarks. With --check, nothing is written, and the
exit code is 1 if anything is out of date. Other languages need a translator: each run lists their
texts that are out of date. With --translated, it records first that all texts of a language are
translations of the current English ones. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.fidelity.shares import PAPER, TOMESD
from tome_nodes.comfyui.node_texts import CAPTIONS, Caption
from tome_nodes.settings.config import OPTIONS
from tome_nodes.settings.options import Option
from tome_nodes.settings.presets import PRESET, PRESETS
from tools import figures
from tools.environment import ROOT
from tools.errors import ToolError
from tools.figures import table

LOCALES = ROOT / "locales"
PAGES = ROOT / "web" / "docs"
TRANSLATED = ROOT / "tools" / "translated.json"
"""For each language, a digest of the English text behind each translation, by its path."""

RATIO = OPTIONS["ratio"].default
JUDGED = {
    "UNet": ("pictures", 12, TOMESD),
    "transformer": ("image", 8, PAPER),
    "video": ("video", 8, PAPER),
}
"""Where the results have each kind of model: judge, number of steps, and the paper's method."""

FIGURES = f"""\
*Time* is the work of a run at `ratio` {RATIO:g}, counted, with 1 for the unpatched one: of a small
UNet in 12 steps; of transformers in 8 steps, in blocks as wide as those of Flux at 1024x1024, and
for video as those of Wan 14B at 480p and 81 frames. *Change* is how much pictures of small trained
models differ, with 1 for the paper's method at 0.5. They are to compare presets by, not what a
large model gains on a GPU. `python3 dev.py bench --fidelity` measures them."""
"""The text below the table of presets, if they were measured."""

MARKED = re.compile(r"(<!-- generated: ([a-z_ ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def english() -> dict[str, Any]:
    """The English locale of the nodes, as ComfyUI reads it."""
    return {
        node.id: {
            "display_name": node.name,
            "description": node.text,
            "inputs": {
                name: {"name": name, "tooltip": text}
                for name, text in (
                    *((slot.name, slot.text) for slot in node.inputs),
                    *((option.name, option.text) for option in node.options),
                )
            },
            "outputs": {
                str(index): {"name": slot.name, "tooltip": slot.text}
                for index, slot in enumerate(node.outputs)
            },
        }
        for node in CAPTIONS
    }


def files() -> dict[Path, str]:
    """The text that each generated file should have."""
    locale = json.dumps(english(), indent=2, ensure_ascii=False) + "\n"
    made = {LOCALES / "en" / "nodeDefs.json": locale, **figures.plots()}
    lists = {PAGES / f"{node.id}.md": _lists(node) for node in CAPTIONS}
    tables = figures.tables()
    for page in lists | tables:
        text, measured = page.read_text(encoding="utf-8"), tables.get(page, {})
        if lost := measured.keys() - {name for _, name, _ in MARKED.findall(text)}:
            markers = ", ".join(f"<!-- generated: {name} -->" for name in sorted(lost))
            raise ToolError(f"{page.relative_to(ROOT).as_posix()} has no {markers}")
        made[page] = _filled(text, {**lists.get(page, {}), **measured})
    return made


def stale() -> dict[Path, str]:
    """The files that are out of date, each with the text that it should have."""
    made = files().items()
    return {file: text for file, text in made if file.read_text(encoding="utf-8") != text}


def unmatched(language: str) -> list[str]:
    """The texts of a language that are missing or unknown."""
    texts, there = dict(texts_of(english())), _texts_in(language)
    return [
        *(f"{language}: {path} is missing" for path in texts if path not in there),
        *(f"{language}: {path} is not in the English locale" for path in there.keys() - texts),
    ]


def outdated(language: str) -> list[str]:
    """The texts of a language that translate an older English text."""
    there = _texts_in(language)
    noted = json.loads(TRANSLATED.read_text(encoding="utf-8")).get(language, {})
    return [
        f"{language}: {path} is out of date"
        for path, text in texts_of(english())
        if path in there and noted.get(path) != _digest(text)
    ]


def _texts_in(language: str) -> dict[str, str]:
    return dict(texts_of(json.loads(_locale(language).read_text(encoding="utf-8"))))


def note_translated(language: str) -> None:
    """Record that all texts of a language are translations of the current English ones."""
    noted = json.loads(TRANSLATED.read_text(encoding="utf-8")) if TRANSLATED.exists() else {}
    noted[language] = {path: _digest(text) for path, text in texts_of(english())}
    TRANSLATED.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _locale(language: str) -> Path:
    return LOCALES / language / "nodeDefs.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def texts_of(part: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """The texts of a locale by a path such as ``ToMePatchModel.ratio``, which is its tooltip."""
    for key, value in part.items():
        here = (*path, key)
        if isinstance(value, str):
            yield ".".join(key for key in here if key not in ("inputs", "tooltip")), value
        else:
            yield from texts_of(value, here)


def _filled(page: str, lists: Mapping[str, str]) -> str:
    """A page with lists and tables filled in between its markers."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{lists[match[2]]}\n{match[3]}"

    return MARKED.sub(fill, page)


def _lists(node: Caption) -> dict[str, str]:
    """The lists of a help page, by the name in their markers.

    The editor shows a page in a narrow panel, which cuts a table of more than two columns.
    """
    plain = [option for option in node.options if not option.advanced]
    advanced = [option for option in node.options if option.advanced]
    slots = [_item(f"`{slot.name}`", slot.text) for slot in node.inputs]
    return {
        "inputs": "\n".join([*slots, *map(_input, plain)]),
        "advanced inputs": "\n".join(map(_input, advanced)),
        "outputs": "\n".join(_item(f"`{slot.name}`", slot.text) for slot in node.outputs),
        **{
            option.name: _choices(option) for option in node.options if any(option.choices.values())
        },
    }


def _item(name: object, text: str, values: str = "") -> str:
    return f"- **{name}**{values and f' ({values})'}: {text}"


def _input(option: Option) -> str:
    if option.choices:
        allowed = ", ".join(f"`{choice}`" for choice in option.choices)
    elif isinstance(option.default, bool):
        allowed = "on or off"
    elif isinstance(option.default, str):
        allowed = "as in KSampler"
    else:
        allowed = f"{option.least:g} to {_figure(option.most)}"
        if option.unset is not None:
            allowed = f"{option.unset:g}, or {allowed}"
    default = option.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    values = f"{allowed}; default {_figure(default)}"
    return _item(f"`{option.name}`", f"{option.text} {option.more}".strip(), values)


def _figure(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _choices(option: Option) -> str:
    items = "\n".join(_item(*choice) for choice in option.choices.items())
    choices = f"The choices of `{option.name}`:\n\n{items}"
    if option.name != PRESET.name or not (judged := _judged()):
        return choices
    names = [name for name in PRESETS if any(name in measured for measured in judged.values())]
    rows = [
        (f"{model}: {what}", *(measured.get(name, ("", ""))[place] for name in names))
        for model, measured in judged.items()
        for place, what in enumerate(("time", "change"))
    ]
    return f"{choices}\n\n{table(('', *names), rows)}\n\n{FIGURES}"


def _judged() -> dict[str, dict[str, tuple[str, str]]]:
    """The time and change of pictures for each preset measured at the default ratio, by model."""
    judged: dict[str, dict[str, tuple[str, str]]] = {}
    for model, (judge, steps, paper) in JUDGED.items():
        rows = figures.rows(judge, steps)
        for name in PRESETS:
            if row := rows.get(f"{_judged_as(name, model)} {RATIO:g}"):
                change = row["error"] / rows[paper]["error"]
                judged.setdefault(model, {})[name] = f"{row['time']:.2f}", f"{change:.2f}"
    return judged


def _judged_as(preset: str, model: str) -> str:
    """The preset that was judged in its place: in a transformer, those that forecast are alike."""
    is_one = model != "UNet" and PRESETS[preset].options.get("forecast")
    return "fast" if is_one else preset


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dev.py generate", description=__doc__)
    languages = sorted(folder.name for folder in LOCALES.iterdir() if folder.name != "en")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    parser.add_argument("--translated", nargs="+", choices=languages, default=[], metavar="LANG")
    chosen = parser.parse_args(arguments)
    if chosen.check:
        late = stale()
        for file in late:
            name = file.relative_to(ROOT).as_posix()
            print(f"{name} is out of date; run: python3 dev.py generate")
        return int(bool(late))
    for language in chosen.translated:
        note_translated(language)
    for file, text in stale().items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT).as_posix()}")
    for language in languages:
        for line in outdated(language):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
