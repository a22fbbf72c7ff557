"""ToMe Report through the real server: what it shows, when, and of which run."""

import re
from io import BytesIO

import pytest
from PIL import Image
from test_server import PLAIN, patch, txt2img

TOME = ["tome", 0]


def report(model=TOME, samples="sampler", **inputs):
    return {
        "class_type": "ToMeReport",
        "inputs": {"model": model, "samples": [samples, 0], **inputs},
    }


def with_report(settings=None, seed=1, steps=2, **inputs):
    """A graph that samples with a patched model and reports on it."""
    nodes = {"tome": patch(**(settings or {})), "report": report(**inputs)}
    return txt2img(TOME, nodes, seed=seed, steps=steps)


@pytest.fixture
def shown(server):
    """What the report nodes of a graph show: by node, the text and the picture."""

    def run(graph):
        outputs = server.run(graph)["outputs"]
        return {
            node: (output["text"][0], server.view(output["images"][0]))
            for node, output in outputs.items()
            if "text" in output
        }

    return run


@pytest.fixture
def text(shown):
    """The text of the one report node of a graph."""

    def run(graph):
        ((told, _),) = shown(graph).values()
        return told

    return run


def test_the_text_tells_what_the_run_did(text):
    lines = text(with_report(seed=11)).splitlines()
    assert lines[:6] == [
        "Model: SD15",
        "Merged: 6 of 6 blocks, 256 -> 128 tokens",
        "Steps: merged in 2 of 2",
        "Plans: 12 made, 0 reused",
        "Settings: ratio 0.50, bipartite, module scope",
        "Backend: torch",
    ]
    assert re.fullmatch(
        r"Time: matching \S+ m?s, merging \S+ m?s, unmerging \S+ m?s, together \S+ % of the run's "
        r"\S+ m?s",
        lines[6],
    )
