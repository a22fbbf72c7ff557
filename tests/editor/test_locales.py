"""What users read of the nodes: translations and help pages tell what the schema says."""

import json
import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from tome_nodes.comfyui.node_texts import CAPTIONS
from tools.environment import ROOT
from tools.generate import LOCALES, PAGES, texts_of

CHOICES = {
    option.name: [choice for choice in option.choices if isinstance(choice, str)]
    for node in CAPTIONS
    for option in node.options
}
NODES = [node.id for node in CAPTIONS]
LANGUAGES = sorted(folder.name for folder in LOCALES.iterdir())


def locale_file(language):
    return json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))


def test_english_texts_are_those_of_the_schema(server, info):
    for node in NODES:
        schema = info[node]
        inputs = {**schema["input"].get("required", {}), **schema["input"].get("optional", {})}
        outputs = zip(schema["output_name"], schema["output_tooltips"], strict=True)
        assert locale_file("en")[node] == {
            "display_name": schema["display_name"],
            "description": schema["description"],
            "inputs": {
                name: {"name": name, "tooltip": options["tooltip"]}
                for name, (_, options) in inputs.items()
            },
            "outputs": {
                str(index): {"name": name, "tooltip": tooltip}
                for index, (name, tooltip) in enumerate(outputs)
            },
        }
        for part in schema["category"].split("/"):
            assert server.get("/i18n")["en"]["nodeCategories"][part] == part


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_reach_the_editor_and_hold_nothing_that_it_would_interpret(server, language):
    assert server.get("/i18n")[language]["nodeDefs"] == locale_file(language)
    for path, text in texts_of(locale_file(language)):
        assert text.strip() == text != "", path
        assert not re.search(r"[@|{}]", text), path


@pytest.mark.parametrize("language", sorted({*LANGUAGES} - {"en"}))
def test_translations_are_whole_sentences_with_the_numbers_and_values_of_the_english(language):
    translated = dict(texts_of(locale_file(language)))
    for path, text in texts_of(locale_file("en")):
        if path.endswith((".name", ".display_name")):
            continue
        there = translated[path]
        assert there != text
        assert there[-1] in ".\N{IDEOGRAPHIC FULL STOP}", path
        if path.endswith(".description"):
            continue
        kept = re.findall(r"\d+(?:[.x]\d+)?", text)
        choices = CHOICES.get(path.rpartition(".")[2], ())
        kept += [choice for choice in choices if re.search(rf"\b{choice}\b", text)]
        assert [part for part in kept if part not in there.replace(",", ".")] == [], path


@pytest.mark.parametrize("file", ["README.md", *(f"web/docs/{node}.md" for node in NODES)])
def test_every_node_has_a_help_page_and_every_picture_of_a_text_is_there(file):
    assert sorted(page.stem for page in PAGES.glob("*.md")) == sorted(NODES)
    page = (ROOT / file).read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    for picture in pictures:
        place = (ROOT / file).parent / picture
        if place.suffix == ".svg":
            assert int(ElementTree.parse(place).getroot().get("viewBox").split()[2]) >= 600
            continue
        with Image.open(place) as image:
            assert image.format == "JPEG"
            assert image.width >= 600
    assert pictures
