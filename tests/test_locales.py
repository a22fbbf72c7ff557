"""What users read of the nodes: translations and help pages tell what the schema says."""

import re

import pytest

from tools.environment import ROOT

NODES = ["ToMePatchModel", "ToMeRemovePatch", "ToMeReport"]


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


def shown(default):
    if isinstance(default, bool):
        return "on" if default else "off"
    return default if isinstance(default, str) else f"{default:g}"


@pytest.mark.parametrize("node", NODES)
def test_help_page_tells_every_input_with_its_default(info, node):
    page = (ROOT / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {info[node]['display_name']}\n")
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:Default (.+?)\. )?", page, re.MULTILINE))
    expected = inputs(info[node])
    assert [name for name in rows if name in expected] == list(expected)
    for name, (_, options) in expected.items():
        if "default" in options:
            assert rows[name] == shown(options["default"]), name


def test_every_help_page_belongs_to_a_node():
    assert sorted(page.stem for page in (ROOT / "web" / "docs").iterdir()) == NODES
