"""ToMe Tune through the real server."""

import json
import re

import pytest
from test_server import PLAIN, node, patch, report, saved_pixels, tune, txt2img

TUNED = ["tune", 0]
SETTINGS = ["tune", 3]


def with_tune(nodes=None, model=TUNED, side=128, seed=1, **inputs):
    """A graph that samples with what ToMe Tune found, and shows its settings."""
    added = {
        "tune": tune(PLAIN, seed=seed, **{"steps": 2, "cfg": 5.0, "scheduler": "normal"}, **inputs),
        "settings": node("PreviewAny", source=SETTINGS),
    }
    return txt2img(model, added | (nodes or {}), seed=seed, side=side)


def text_and_settings(entry):
    """The text on the node, and the settings that it found."""
    outputs = entry["outputs"]
    return outputs["tune"]["text"][0], json.loads(outputs["settings"]["text"][0])


@pytest.mark.parametrize("wish", [{"speed_up": 1.0}, {"goal": "likeness", "change": 0.0}], ids=str)
def test_a_wish_for_nothing_gives_the_unpatched_picture_and_says_why(server, wish):
    """256 x 256 pixels."""
    entry = server.run(with_tune(side=256, seed=31, **wish))
    text, settings = text_and_settings(entry)
    assert text.startswith("Unpatched: ") and text.endswith("what the model has without ToMe.")
    assert settings == {"preset": "balanced", "ratio": 0.0}
    plain = server.run(txt2img(seed=31, side=256))
    assert saved_pixels(server, entry) == saved_pixels(server, plain)


def test_what_is_found_can_be_reported_on_and_does_the_same_on_the_patch_node(server):
    """Whatever is found: times on a machine at work say nothing of which it is."""
    wish = {"goal": "likeness", "change": 1.0, "measure_again": True}
    entry = server.run(with_tune({"report": report(TUNED)}, seed=32, **wish))
    text, settings = text_and_settings(entry)
    assert re.search(r"^Trials: as long as \d\.\d sampling runs$", text, re.M)
    assert text.count("Tried ") >= 1
    (reported,) = entry["outputs"]["report"]["text"]
    if settings["ratio"] == 0:
        assert reported.startswith("This model has no token merging.")
    else:
        times = r"\d\.\d\d times as fast: \S+ m?s a step, \S+ m?s unpatched"
        assert re.search(rf"^Helped: {times} \(ToMe Tune\)$", reported, re.M)
    linked = server.run(with_tune({"tome": patch(settings=SETTINGS)}, ["tome", 0], seed=32, **wish))
    assert json.loads(linked["outputs"]["settings"]["text"][0]) == settings
    given = server.run(
        txt2img(["tome", 0], {"tome": patch(settings=json.dumps(settings))}, seed=32)
    )
    expected = saved_pixels(server, entry)
    assert saved_pixels(server, given) == saved_pixels(server, linked) == expected


def test_a_bar_shows_how_far_it_is(server):
    values = []

    def look(event):
        if event["type"] == "progress_state":
            node = event["data"]["nodes"].get("tune")
            values.extend([node] if node else [])

    server.run(with_tune(seed=35, speed_up=3.0, measure_again=True), on_event=look)
    assert len({node["value"] for node in values}) > 2
    assert {node["max"] for node in values if node["value"] > 1} == {18}
