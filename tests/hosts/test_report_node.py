"""ToMe Report and ToMe Tune through the real server."""

import json
import re
from copy import deepcopy
from io import BytesIO

import pytest
from PIL import Image
from test_server import PLAIN, node, report, saved_pixels, tune, txt2img
from test_server import patch as any_patch

TEXT = "progress_text"


def patch(model=PLAIN, **inputs):
    """Merges half of the tokens, in the paper's way if nothing else is said."""
    return any_patch(model, **{"preset": "custom", "ratio": 0.5, "min_tokens": 1, **inputs})


def without_report(seed, steps=2):
    return txt2img(["tome", 0], {"tome": patch()}, seed=seed, steps=steps, side=128)


def with_report(seed, steps=2, **inputs):
    return without_report(seed, steps) | {"report": report(**inputs)}


def second_sampler(graph, name, **inputs):
    graph[name] = deepcopy(graph["sampler"])
    graph[name]["inputs"] |= inputs


@pytest.fixture
def shown(server):
    def run(graph, **options):
        outputs = server.run(graph, **options)["outputs"]
        return {
            node: (output["text"][0], Image.open(BytesIO(server.view(output["images"][0]))))
            for node, output in outputs.items()
            if {"text", "images"} <= output.keys()
        }

    return run


def test_each_view_of_a_run_is_a_different_picture(server, shown):
    graph = with_report(seed=12, image=["decode", 0])
    graph["latent"]["inputs"]["batch_size"] = 2
    graph["chart"] = report(view="chart")
    graph["first"] = report(step=1)
    graph["nowhere"] = report(level=4)
    graph["never"] = report(step=3)
    graph["save_report"] = node("SaveImage", images=["chart", 0], filename_prefix="report")
    graph["text"] = node("PreviewAny", source=["chart", 1])
    views = shown(graph)
    texts = {text for text, _ in views.values()}
    assert len(texts) == 1
    pictures = {name: picture.tobytes() for name, (_, picture) in views.items()}
    assert len({*pictures.values()}) == len(pictures)
    assert views["nowhere"][1].width == views["never"][1].width == 800

    sampler_ran = []
    graph["report"]["inputs"]["view"] = "chart"
    views = shown(graph, on_event=lambda event: sampler_ran.append(event["data"].get("node")))
    assert "report" in sampler_ran and "sampler" not in sampler_ran
    assert views["report"][1].tobytes() == pictures["chart"]
    assert "not writable" not in server.log


def test_a_view_that_is_not_there_is_refused(server):
    graph = with_report(seed=19, image=["decode", 0])
    graph["saved"] = report(image=["decode", 0])
    for view in "map", ["heat map"], {"a": 1}:
        graph["saved"]["inputs"]["view"] = {"__value__": view}
        errors = server.post("/prompt", {"prompt": graph})["node_errors"]["saved"]["errors"]
        assert [error["extra_info"]["input_name"] for error in errors] == ["view"]
        assert "not in ['merge map', 'chart']" in errors[0]["details"]


def test_a_report_added_after_the_run_has_counts_and_says_how_to_get_the_rest(shown):
    assert shown(without_report(seed=13)) == {}
    text, card = shown(with_report(seed=13))["report"]
    assert "Done: merged 4 of 4 blocks" in text
    assert "Details: maps and times were not recorded" in text
    assert card.width == 800

    # Only the sampler is executed again for these, not the patch node.
    assert "Time: " in shown(with_report(seed=14))["report"][0]
    assert shown(without_report(seed=15)) == {}
    assert "Details: " in shown(with_report(seed=15))["report"][0]


def test_a_report_without_a_run_says_why(shown):
    graph = with_report(seed=16, samples="plain")
    second_sampler(graph, "plain", model=PLAIN)
    graph["off"] = patch(ratio=0.0)
    graph["no_patch"], graph["ratio_0"] = report(PLAIN), report(["off", 0])
    views = shown(graph)
    for name in "no_patch", "ratio_0":
        text, card = views[name]
        assert text.startswith("ToMe is not on this model.\nHint: connect the model")
        assert card.width == 800
    text, _ = views["report"]
    assert text.startswith("No run of this model is known that made these samples.\nHint: ")


def test_each_report_is_about_the_run_and_the_patch_it_is_connected_to(shown):
    graph = with_report(seed=17)
    second_sampler(graph, "second", steps=3, latent_image=["sampler", 0], denoise=0.5)
    graph["second_report"] = report(samples="second")
    graph["same"] = patch()
    graph["least"] = patch(ratio=0.25)
    graph["less"] = node("FreeU_V2", model=["least", 0], b1=1.3, b2=1.4, s1=0.9, s2=0.2)
    for name, patched in ("same", "same"), ("less", "least"):
        second_sampler(graph, f"{name}_sampler", model=[name, 0])
        graph[f"{name}_report"] = report([patched, 0], f"{name}_sampler")
        graph[f"{name}_keep"] = report([name, 0], f"{name}_sampler", view="chart")
    lines = []
    views = shown(graph, on_event=lambda e: lines.append(e) if e["type"] == TEXT else None)
    texts = {name: text for name, (text, _) in views.items()}
    assert "Steps: merged in 2 of 2" in texts["report"]
    assert "Steps: merged in 3 of 3" in texts["second_report"]
    for name in "same_report", "same_keep":
        assert "Tokens: 256 -> 128" in texts[name]
    for name in "less_report", "less_keep":
        assert "Tokens: 256 -> 192" in texts[name]
    assert all("Time: " in text for text in texts.values())
    told_on = {line["data"]["node"] for line in lines}
    assert told_on == {"tome", "same", "least"}


def test_a_line_on_the_patch_node_shows_each_step_once(server):
    lines = []
    graph = with_report(seed=18, steps=3)
    # It evaluates the model twice in a step.
    graph["sampler"]["inputs"]["sampler_name"] = "heun"
    # The editor names a node in a subgraph like this.
    graph["4:7"] = graph.pop("tome")
    graph["report"]["inputs"]["model"] = graph["sampler"]["inputs"]["model"] = ["4:7", 0]
    server.run(graph, on_event=lambda e: lines.append(e["data"]) if e["type"] == TEXT else None)
    assert lines == [
        {"node": "4:7", "text": f"4/4 blocks, 256\N{RIGHTWARDS ARROW}128 tokens, step {step}/3"}
        for step in (1, 2, 3)
    ]


TUNED = ["tune", 0]
SETTINGS = ["tune", 3]


def with_tune(nodes=None, model=TUNED, side=224, seed=1, **inputs):
    added = {
        "tune": tune(PLAIN, seed=seed, **{"steps": 2, "cfg": 1.0, "scheduler": "normal"}, **inputs),
        "settings": node("PreviewAny", source=SETTINGS),
    }
    return txt2img(model, added | (nodes or {}), steps=2, seed=seed, side=side)


def text_and_settings(entry):
    outputs = entry["outputs"]
    return outputs["tune"]["text"][0], json.loads(outputs["settings"]["text"][0])


@pytest.mark.parametrize("wish", [{"speed_up": 1.0}, {"goal": "likeness", "change": 0.0}], ids=str)
def test_a_wish_for_nothing_gives_the_unpatched_picture_and_says_why(server, wish):
    entry = server.run(with_tune(side=128, seed=31, **wish))
    text, settings = text_and_settings(entry)
    assert text.startswith("Unpatched: ") and text.endswith("what the model has without ToMe.")
    assert settings == {"preset": "balanced", "ratio": 0.0}
    plain = server.run(txt2img(steps=2, seed=31, side=128))
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
        assert reported.startswith("ToMe is not on this model.")
    else:
        assert re.search(r"^Helped: ", reported, re.M)
    tome = {"tome": any_patch(settings=SETTINGS)}
    linked = server.run(with_tune(tome, ["tome", 0], seed=32, **wish))
    assert json.loads(linked["outputs"]["settings"]["text"][0]) == settings
    tome = {"tome": any_patch(settings=json.dumps(settings))}
    given = server.run(txt2img(["tome", 0], tome, steps=2, seed=32, side=224))
    expected = saved_pixels(server, entry)
    assert saved_pixels(server, given) == saved_pixels(server, linked) == expected


def test_a_bar_shows_how_far_it_is(server):
    values = []

    def look(event):
        if event["type"] == "progress_state":
            node = event["data"]["nodes"].get("tune")
            values.extend([node] if node else [])

    server.run(with_tune(seed=35, side=128, speed_up=3.0, measure_again=True), on_event=look)
    assert len({node["value"] for node in values}) > 2
    assert {node["max"] for node in values if node["value"] > 1} == {18}
