"""Who feeds whom in the workflow that runs, also where nodes make nodes."""

import sys
from types import ModuleType

import pytest
from comfy_execution.graph import DynamicPrompt
from comfy_execution.progress import reset_progress_state
from comfy_execution.utils import CurrentNodeContext
from test_server import node

from tome_nodes.comfyui import workflow

GRAPH = {
    "loader": node("Loader"),
    "tome": node("ToMePatchModel", model=["loader", 0], ratio=0.5),
    "lora": node("Lora", model=["tome", 0]),
    "sampler": node("KSampler", model=["lora", 0], seed=3),
    "other": node("KSampler", model=["loader", 0]),
    "report": node("ToMeReport", model=["lora", 0], samples=["sampler", 0], view="chart"),
    "idle": node("ToMePatchModel", model=["loader", 0]),
}


@pytest.fixture
def prompt():
    prompt = DynamicPrompt(dict(GRAPH))
    reset_progress_state("a prompt", prompt)
    yield prompt
    reset_progress_state("", DynamicPrompt({}))


def running(node):
    return CurrentNodeContext("a prompt", node)


def test_a_report_is_fed_by_every_node_upstream_of_its_model(request):
    assert workflow.running_node() is None
    assert workflow.origins("samples") is None
    assert not workflow.feeds("tome", "ToMeReport", "model")
    request.getfixturevalue("prompt")
    assert workflow.feeds("tome", "ToMeReport", "model")
    assert not workflow.feeds("idle", "ToMeReport", "model")
    assert not workflow.feeds("tome", "ToMeReport", "image")
    assert workflow.feeds("other", "ToMeReport", "samples") is False


def test_a_node_stands_for_those_that_it_makes(prompt):
    prompt.original_prompt["group"] = node("Group", model=["tome", 0])
    prompt.original_prompt["outside"] = node("ToMeReport", model=["group", 0])
    inside = {
        "group.patch": node("ToMePatchModel", model=["tome", 0]),
        "group.sampler": node("KSampler", model=["group.patch", 0]),
        "group.report": node("ToMeReport", model=["group.patch", 0], samples=["group.sampler", 0]),
    }
    for name, made in inside.items():
        prompt.add_ephemeral_node(name, made, "group", "group")
    with running("group.patch"):
        assert workflow.running_node() == "group"
    assert workflow.feeds("group", "ToMeReport", "model")
    with running("group.report"):
        assert workflow.origins("samples") == {"group", "tome", "loader"}


def test_dangling_and_circular_links_are_handled(prompt):
    prompt.original_prompt["report"] = node("ToMeReport", model=["gone", 0], samples=["sampler", 0])
    prompt.original_prompt["loader"] = node("Loader", model=["lora", 0])
    assert not workflow.feeds("tome", "ToMeReport", "model")
    with running("report"):
        assert workflow.running_node() == "report"
        assert workflow.origins("samples") == {"sampler", "lora", "tome", "loader"}
        assert workflow.origins("view") == workflow.origins("image") == set()


def test_the_server_is_not_imported_only_to_ask_for_it(monkeypatch):
    """In ComfyUI 0.18.2, what it imports may be of another folder by then."""
    monkeypatch.delitem(sys.modules, "server", raising=False)
    assert workflow.running_server() is None
    assert "server" not in sys.modules
    monkeypatch.setitem(sys.modules, "server", ModuleType("server"))
    assert workflow.running_server() is None
