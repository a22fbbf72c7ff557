"""ToMe Tune and the input settings of ToMe Patch Model through the real server."""

import json
import re
from io import BytesIO

import pytest
from PIL import Image
from test_server import PLAIN, node, patch, report, tune, txt2img

from tools.server import ExecutionFailed, PromptRejected

TUNED = ["tune", 0]
SETTINGS = ["tune", 3]


def with_tune(nodes=None, model=TUNED, side=128, seed=1, **inputs):
    tuned = tune(PLAIN, seed=seed, **{"steps": 2, "cfg": 5.0, "scheduler": "normal"}, **inputs)
    return txt2img(model, {"tune": tuned, **(nodes or {})}, seed=seed, side=side)


def shown(entry):
    """The text on the node, and the settings that it found."""
    outputs = entry["outputs"]
    return outputs["tune"]["text"][0], json.loads(outputs["settings"]["text"][0])


SHOW = {"settings": node("PreviewAny", source=SETTINGS)}


def picture(server, entry):
    (data,) = server.images(entry)
    return Image.open(BytesIO(data)).convert("RGB").tobytes()


def test_the_node_is_listed_as_users_find_it(info):
    node = info["ToMeTune"]
    assert node["display_name"] == "ToMe Tune"
    assert node["category"] == "model/patch"
    assert node["output"] == ["MODEL", "IMAGE", "STRING", "STRING"]
    assert node["output_name"] == ["MODEL", "IMAGE", "text", "settings"]
    assert {"token merging", "benchmark"} <= set(node["search_aliases"])
    assert node["output_node"]
    assert list(node["input"]["required"]) == ["model", "positive", "negative", "latent_image"]
    optional, host = node["input"]["optional"], info["KSampler"]["input"]["required"]
    for name in ("sampler_name", "scheduler"):
        assert optional[name][1]["options"] == host[name][0]


@pytest.mark.parametrize("wish", [{"speed_up": 1.0}, {"goal": "likeness", "change": 0.0}], ids=str)
def test_a_wish_for_nothing_gives_the_unpatched_picture_and_says_why(server, wish):
    """256 x 256 pixels."""
    entry = server.run(with_tune(SHOW, side=256, seed=31, **wish))
    text, settings = shown(entry)
    assert text.startswith("Unpatched: ") and text.endswith("what the model has without merging.")
    assert settings == {"preset": "balanced", "ratio": 0.0}
    plain = server.run(txt2img(seed=31, side=256))
    assert picture(server, entry) == picture(server, plain)


def test_the_settings_that_are_found_do_the_same_on_the_patch_node(server):
    """Whatever is found: times on a machine at work say nothing of which it is."""
    wish = {"goal": "likeness", "change": 1.0, "measure_again": True}
    entry = server.run(with_tune(SHOW, seed=32, **wish))
    text, settings = shown(entry)
    assert re.search(r"^Trials: as long as \d\.\d sampling runs$", text, re.M)
    assert text.count("Tried ") >= 1
    linked = server.run(
        with_tune({**SHOW, "tome": patch(settings=SETTINGS)}, ["tome", 0], seed=32, **wish)
    )
    assert json.loads(linked["outputs"]["settings"]["text"][0]) == settings
    given = server.run(
        txt2img(["tome", 0], {"tome": patch(settings=json.dumps(settings))}, seed=32)
    )
    assert picture(server, given) == picture(server, entry) == picture(server, linked)


def test_a_bar_shows_how_far_it_is(server):
    values = []

    def look(event):
        if event["type"] == "progress_state":
            node = event["data"]["nodes"].get("tune")
            values.extend([node] if node else [])

    server.run(with_tune(seed=35, speed_up=3.0, measure_again=True), on_event=look)
    assert len({node["value"] for node in values}) > 2
    assert {node["max"] for node in values if node["value"] > 1} == {14}


def test_its_model_can_be_reported_on(server):
    nodes = {"report": report(TUNED), **SHOW}
    entry = server.run(with_tune(nodes, seed=36, goal="likeness", change=1.0))
    text, settings = entry["outputs"]["report"]["text"][0], shown(entry)[1]
    if settings["ratio"] == 0:
        assert text.startswith("This model has no token merging.")
    else:
        assert re.search(
            r"^Helped: \d\.\d\d times as fast: \S+ m?s a step, \S+ m?s unpatched "
            r"\(ToMe Tune\)$",
            text,
            re.M,
        )


def test_settings_count_in_place_of_the_other_inputs(server):
    def of(**inputs):
        return picture(server, server.run(txt2img(["tome", 0], {"tome": patch(**inputs)}, seed=37)))

    expected = of(preset="fast", ratio=0.5)
    given = '{"preset": "fast", "ratio": 0.5}'
    assert of(settings=given) == of(settings=given, preset="quality", ratio=0.1) == expected
    assert of(settings=given, preset="custom", sx=4, min_tokens=1) == expected
    assert of(settings='{"ratio": 0.5}', preset="fast", ratio=0.1) == expected
    assert of(settings="{}", preset="fast", ratio=0.5) == expected
    assert of(settings='{"ratio": 0.5, "max_downsample": "auto"}', preset="fast") == expected


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ("{", "is not allowed: it is not JSON"),
        ("", "is not allowed: it is not JSON"),
        ("[1]", "is not allowed: it must be a JSON object of inputs by name"),
        ('{"foo": 1}', "is not allowed: there is no foo; there are preset, ratio"),
        ('{"ratio": 2}', "ratio=2 is not allowed: it must be from 0.0 to 0.95"),
        ('{"ratio": NaN}', "ratio=nan is not allowed: it must be from 0.0 to 0.95"),
        ('{"preset": "slow"}', "preset='slow' is not allowed: it must be one of quality"),
        ('{"preset": "fast", "sx": 3}', "sx=3 does not count under preset='fast'"),
        (7, "settings=7 is not allowed: it must be a JSON text"),
    ],
)
def test_bad_settings_are_refused_at_their_input(server, settings, part):
    with pytest.raises(PromptRejected) as rejected:
        server.queue(txt2img(["tome", 0], {"tome": patch(settings=settings)}))
    (error,) = rejected.value.node_errors["tome"]["errors"]
    assert part in error["message"] + error["details"]


def test_bad_settings_over_a_link_end_in_a_sentence(server):
    text = node("PrimitiveString", value='{"ratio": 2}')
    graph = txt2img(["tome", 0], {"tome": patch(settings=["text", 0]), "text": text})
    sentence = re.escape("settings='{\"ratio\": 2}': ratio=2 is not allowed")
    with pytest.raises(ExecutionFailed, match=sentence):
        server.run(graph)
