"""The commands of docs/http.md, as they stand, against the real server."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from common import run_tool
from PIL import Image

from tools.environment import ROOT
from tools.workflow import load_graph

USUAL_ADDRESS = re.compile(r"127\.0\.0\.1(:| --port )8188")
GRAPH = Path("workflows", "api", "tome_txt2img.json")
RATIO_OF_THE_FILE, RATIO_OF_THE_SCRIPT = "0.60", "0.40"

needs_curl = pytest.mark.skipif(
    shutil.which("curl") is None and "CI" not in os.environ, reason="there is no curl here"
)


@pytest.fixture
def snippets(server):
    """The page's commands in a language, with the server's address in place of the usual one."""
    text = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    page = USUAL_ADDRESS.sub(rf"127.0.0.1\g<1>{server.port}", text)
    return lambda language: re.findall(
        rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )


@pytest.fixture
def clone(tmp_path):
    """A folder with the sample graph at its place in the repository, made small."""
    graph = load_graph(ROOT / GRAPH)
    small = {"ckpt_name": "sd15.ckpt", "width": 256, "height": 256, "steps": 2}
    for node in graph.values():
        node["inputs"] |= {name: small[name] for name in small.keys() & node["inputs"].keys()}
        if node["class_type"] == "KSampler":
            # Otherwise the server finds the images in its cache and saves none.
            node["inputs"]["clone"] = tmp_path.name
    (tmp_path / GRAPH).parent.mkdir(parents=True)
    (tmp_path / GRAPH).write_text(json.dumps(graph), encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(clone):
    return lambda *command: run_tool(command, clone, clone, no_proxy="127.0.0.1").stdout


@pytest.fixture
def merged(server):
    """The ratios that the pack has logged since the test began."""
    read = len(server.log)
    return lambda: re.findall(r"\[ToMe\] .*: merged .* ratio ([\d.]+)", server.log[read:])


def is_the_picture(file):
    with Image.open(file) as image:
        return image.format == "PNG" and image.size == (256, 256)


@needs_curl
def test_curl_queues_the_graph_and_gets_its_image(server, snippets, clone, run, merged):
    queue, fetch, _ = snippets("sh")
    queued = json.loads(run("sh", "-c", queue))
    assert queued["node_errors"] == {}
    # The queue is first in, first out, so once this has run, so has the other.
    server.run({"1": {"class_type": "PreviewAny", "inputs": {"source": queued["prompt_id"]}}})
    (entry,) = server.get(f"/history/{queued['prompt_id']}").values()
    (image,) = (image for output in entry["outputs"].values() for image in output["images"])
    assert merged() == [RATIO_OF_THE_FILE]

    history = run("sh", "-c", fetch.replace("tome_txt2img_00001_.png", image["filename"]))
    assert len(json.loads(history)) == 1
    assert is_the_picture(clone / "tome.png")


@needs_curl
def test_curl_gets_a_message_that_says_what_is_allowed(snippets, clone, run):
    text = (clone / GRAPH).read_text(encoding="utf-8")
    (clone / GRAPH).write_text(text.replace('"ratio": 0.6', '"ratio": 2'), encoding="utf-8")
    answer = run("sh", "-c", snippets("sh")[0])
    assert "ratio=2.0 is not allowed: it must be from 0.0 to 0.95" in answer


def test_python_script_sets_a_ratio_and_saves_the_image(snippets, clone, run, merged):
    (script,) = snippets("python")
    assert re.findall(r"^(?:import|from) (\w+)", script, re.MULTILINE) == [
        *("json", "time", "pathlib", "urllib", "urllib")
    ]
    saved = run(sys.executable, "-c", script).split()
    assert saved[0] == "saved"
    assert is_the_picture(clone / saved[1])
    assert merged() == [RATIO_OF_THE_SCRIPT]


def test_comfy_cli_runs_the_graph_and_reports_where_the_image_is(server, snippets, run, merged):
    (command,) = (snippet for snippet in snippets("sh") if snippet.startswith("comfy "))
    answer = json.loads(run(*command.split()))
    assert answer["data"]["status"] == "completed"
    (address,) = answer["data"]["outputs"]
    assert address.startswith(f"{server.url}/view?filename=tome_txt2img_")
    assert merged() == [RATIO_OF_THE_FILE]
