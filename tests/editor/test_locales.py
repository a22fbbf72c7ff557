"""What users read of the nodes: translations and help pages tell what the schema says."""

import json
import re

import pytest
from PIL import Image

from tome_nodes.comfyui.node_texts import CAPTIONS
from tools.environment import ROOT

CHOICES = {
    option.name: [choice for choice in option.choices if isinstance(choice, str)]
    for node in CAPTIONS
    for option in node.options
}
NODES = ["ToMePatchModel", "ToMeRemovePatch", "ToMeReport", "ToMeTune"]
LANGUAGES = ["de", "es", "fr", "ja", "ko", "ru", "zh"]


def inputs(schema):
    return {**schema["input"].get("required", {}), **schema["input"].get("optional", {})}


def test_english_texts_reach_the_editor_and_are_those_of_the_schema(server, info):
    served = server.get("/i18n")["en"]
    for node in NODES:
        schema = info[node]
        assert served["nodeDefs"][node] == {
            "display_name": schema["display_name"],
            "description": schema["description"],
            "inputs": {
                name: {"name": name, "tooltip": options["tooltip"]}
                for name, (_, options) in inputs(schema).items()
            },
            "outputs": {
                str(index): {"name": name, "tooltip": tooltip}
                for index, (name, tooltip) in enumerate(
                    zip(schema["output_name"], schema["output_tooltips"], strict=True)
                )
            },
        }
        for part in schema["category"].split("/"):
            assert served["nodeCategories"][part] == part


def test_locale_texts_hold_no_character_that_the_editor_would_interpret():
    text = (ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8")
    texts = re.findall(r'"(?:name|tooltip|display_name|description)": "(.*)"', text)
    assert texts
    assert not re.search(r"[@|{}]", "".join(texts))


def texts(node):
    """The texts of a locale file's node by their path in it."""
    if isinstance(node, str):
        return {(): node}
    return {(key, *path): text for key in node for path, text in texts(node[key]).items()}


def locale_file(language):
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def test_every_language_has_a_file():
    assert sorted(folder.name for folder in (ROOT / "locales").iterdir()) == sorted(
        ["en", *LANGUAGES]
    )


@pytest.mark.parametrize("language", LANGUAGES)
def test_translation_has_all_texts_of_the_english_one_and_no_other(server, language):
    english, translated = texts(locale_file("en")), texts(locale_file(language))
    assert translated.keys() == english.keys()
    for path, text in translated.items():
        assert text.strip() == text != ""
        assert not re.search(r"[@|{}]", text), path
        if path[-1] in ("tooltip", "description"):
            assert text != english[path]
            assert text[-1] in ".。", path
    assert server.get("/i18n")[language]["nodeDefs"] == locale_file(language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_translation_keeps_numbers_values_and_formulas(language):
    english, translated = texts(locale_file("en")), texts(locale_file(language))
    for path, text in english.items():
        kept = re.findall(r"\d+(?:[.x]\d+)?", text)
        if path[-1] == "tooltip" and path[-2] in CHOICES:
            kept += [word for word in CHOICES[path[-2]] if re.search(rf"\b{word}\b", text)]
        there = translated[path].replace(",", ".")
        if path[-1] == "tooltip":
            assert [part for part in kept if part not in there] == [], path


def test_every_help_page_belongs_to_a_node():
    assert sorted(page.stem for page in (ROOT / "web" / "docs").glob("*.md")) == NODES


@pytest.mark.parametrize("file", ["README.md", *(f"web/docs/{node}.md" for node in NODES)])
def test_every_picture_that_a_text_shows_is_there(file):
    page = (ROOT / file).read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    for picture in pictures:
        with Image.open((ROOT / file).parent / picture) as image:
            assert image.format == "JPEG"
            assert image.width >= 600
    assert pictures
