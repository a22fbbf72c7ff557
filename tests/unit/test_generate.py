"""What is made from the options is up to date, and so are the translations."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tome_nodes.comfyui.node_texts import CAPTIONS
from tools import generate
from tools.errors import ToolError
from tools.plot import SERIES, plot

LANGUAGES = ["de", "es", "fr", "ja", "ko", "ru", "zh"]


def test_generated_files_are_those_that_the_options_give():
    assert generate.stale() == {}, "run: python3 dev.py generate"
    # It writes nothing else.
    command = [sys.executable, generate.ROOT / "dev.py", "generate"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "wrote" not in done.stdout


def test_a_page_with_another_figure_than_the_results_or_without_a_table_is_named(
    tmp_path, monkeypatch, capsys
):
    page = tmp_path / "README.md"
    page.write_text("<!-- generated: work -->\n| 0.55 |\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "CAPTIONS", ())
    monkeypatch.setattr(generate, "english", dict)
    monkeypatch.setattr(generate, "LOCALES", tmp_path / "locales")
    (tmp_path / "locales" / "en").mkdir(parents=True)
    (tmp_path / "locales" / "en" / "nodeDefs.json").write_text("{}\n", encoding="utf-8")
    monkeypatch.setattr(generate.figures, "tables", lambda: {page: {"work": "| 0.60 |"}})
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("README.md is out of date")
    generate.main([])
    assert "| 0.60 |" in page.read_text(encoding="utf-8")
    assert generate.main(["--check"]) == 0
    page.write_text("no markers", encoding="utf-8")
    with pytest.raises(ToolError, match=r"README.md has no <!-- generated: work -->"):
        generate.main(["--check"])


def row(kind, time, error):
    return {"kind": kind, "time": time, "error": error}


def test_the_plot_shows_less_work_further_left_and_less_change_further_down():
    rows = {
        "plain": row("plain", 1.0, 0.0),
        "fast 0.6": row("ours", 0.3, 0.01),
        "fast 0.3": row("ours", 0.6, 0.001),
        "tomesd q,k,v 0.5": row("merging", 0.6, 0.1),
        "shallow 0.6, nothing merged": row("ours", 0.5, 0.02),
    }
    panel = ElementTree.fromstring(plot([("A UNet", rows)])).find("{*}g")
    places = {}
    for mark in panel.iterfind("*[@fill][@transform]"):
        x, y = mark.get("transform")[len("translate(") : -1].split()
        places.setdefault(mark.get("fill"), []).append((float(x), float(y)))
    colours = {series.title: series.colour for series in SERIES}
    assert places.keys() == {colours["fast"], colours["tomesd"]}
    (left, low), (right, lowest) = places[colours["fast"]]
    ((at, high),) = places[colours["tomesd"]]
    assert left / right == pytest.approx(0.5, rel=0.01) and at == right
    # Down is further on; a tenth of the change is as far everywhere.
    assert low - high == pytest.approx(lowest - low, abs=0.2) and low > high
    assert panel.find("{*}text").text == "A UNet"


def test_every_text_of_a_node_is_in_its_help_page():
    for node in CAPTIONS:
        page = (generate.PAGES / f"{node.id}.md").read_text(encoding="utf-8")
        for slot in (*node.inputs, *node.options):
            assert page.count(f"\n- **`{slot.name}`**") == 1, slot.name
        for option in node.options:
            for name, text in option.choices.items():
                assert not text or f"\n- **{name}**: {text}\n" in page, name


def test_no_tooltip_is_longer_than_anybody_reads():
    texts = dict(generate.texts_of(generate.english()))
    assert {path: text for path, text in texts.items() if len(text.split()) > 60} == {}
    sentences = texts["ToMePatchModel.ratio"].rstrip(".").split(". ")
    assert len(sentences) == 2


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated(language):
    assert generate.unmatched(language) == []


def test_what_is_wrong_with_a_translation_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "LOCALES", tmp_path / "locales")
    monkeypatch.setattr(generate, "TRANSLATED", tmp_path / "translated.json")
    generate.note_translated("ko")
    changed, there = json.loads(json.dumps([generate.english()] * 2))
    changed["ToMePatchModel"]["inputs"]["ratio"]["tooltip"] = "Another text."
    monkeypatch.setattr(generate, "english", lambda: changed)
    monkeypatch.setattr(generate, "files", dict)
    del there["ToMeReport"]["inputs"]["view"]["tooltip"]
    there["ToMeReport"]["inputs"]["depth"] = {"tooltip": "It is gone."}
    file = tmp_path / "locales" / "ko" / "nodeDefs.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(there), encoding="utf-8")
    assert generate.unmatched("ko") == [
        "ko: ToMeReport.view is missing",
        "ko: ToMeReport.depth is not in the English locale",
    ]
    generate.main([])
    assert capsys.readouterr().out == "ko: ToMePatchModel.ratio is out of date\n"
    file.write_text(json.dumps(changed), encoding="utf-8")
    generate.main(["--translated", "ko"])
    assert generate.unmatched("ko") == generate.outdated("ko") == []
