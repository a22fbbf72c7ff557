"""Bad graphs through the real server: all are refused or end in a sentence; the queue goes on.

Only nodes of the pack get inputs here that the host cannot take even in its own. Two faults end the
host's queue or its answer in any node, so nothing here has them: no inputs at all, and a link to no
node in the wrapping of a value.
"""

import json
from itertools import cycle

import pytest
import torch
from comfy.model_patcher import ModelPatcher
from hypothesis import given, settings
from hypothesis import strategies as st
from test_server import PLAIN, PROMPTS, node, patch, report, txt2img
from torch.nn import Linear

from tome_nodes.comfyui import nodes
from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.node_texts import CAPTIONS, PATCH, REMOVE, REPORT, TUNE
from tome_nodes.comfyui.tune.trials import HOST_NAMES
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.options import OptionError
from tools.server import ExecutionFailed, PromptRejected

GRAPHS = 200
OURS = "custom_nodes/tome-nodes/tome_nodes"


def switch(link):
    """Its output goes to inputs of any type."""
    return node("ComfySwitchNode", switch=True, on_false=link, on_true=link)


def only(output, **nodes):
    """A small graph with one output, which shows an output of any type as text."""
    graph = txt2img(nodes=nodes, steps=1, side=64)
    graph["sampler"]["inputs"]["cfg"] = 1.0
    del graph["save"], graph["decode"]
    if output is not None:
        graph["shown"] = node("PreviewAny", source=output)
    return graph


def refusal(server, graph):
    """The messages about the one node of a graph that is refused."""
    with pytest.raises(PromptRejected) as rejected:
        server.queue(graph)
    (report,) = rejected.value.node_errors.values()
    return [error["message"] + ": " + error["details"] for error in report["errors"]]


def failure(server, graph):
    """What the server tells of the error that ends a run."""
    events = []
    with pytest.raises(ExecutionFailed):
        server.run(graph, events.append)
    return error_among(events)


def error_among(events):
    (error,) = (event["data"] for event in events if event["type"] == "execution_error")
    return error


ABSENT = ["absent", 0]
TUNED = PROMPTS | {"steps": 1}


def alone(output, class_type, **inputs):
    return only(output, tested=node(class_type, **inputs))


NODES = {
    "patch": lambda **inputs: alone(["tested", 0], PATCH.id, **inputs),
    "tune": lambda **inputs: alone(["tested", 0], TUNE.id, **(inputs and TUNED | inputs)),
    "remove": lambda **inputs: alone(["tested", 0], REMOVE.id, **inputs),
    "report": lambda **inputs: alone(None, REPORT.id, **{"samples": ["latent", 0], **inputs}),
}
"""Graphs with one node of the pack; without inputs, that has none to run on."""

KINDS = [*zip(NODES, CAPTIONS, strict=True)]

NOT_A_LINK = [
    (kind, slot.name, slot.type)
    for kind, caption in KINDS
    for slot in caption.inputs
    if not slot.is_text
]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[("text", "'text'"), (5, "5"), (float("nan"), "nan"), ({"a": 1}, "<dict>")],
        ({"__value__": []}, "<list>"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("kind", "name", "type_"), NOT_A_LINK)
def test_a_value_in_place_of_a_link_is_refused(server, kind, name, type_, value, shown):
    assert refusal(server, NODES[kind](**{"model": PLAIN, name: value})) == [
        f"Custom validation failed for node: model - {name}={shown} is not allowed: "
        f"it must be a link to an output of type {type_}"
    ]


@pytest.mark.parametrize("link", [["latent", 0], ABSENT], ids=["to a node", "to no node"])
@pytest.mark.parametrize(("kind", "caption"), KINDS)
def test_a_link_to_an_input_that_there_is_not_is_refused(server, kind, caption, link):
    """The host would follow it without looking whether there is such a node."""
    graph = NODES[kind](model=PLAIN, foo=link, bar=3, ratio=2.0)
    message = refusal(server, graph)[-1]
    assert f"foo={link} is not allowed: {caption.name} has no such input; it has model" in message
    # A value for one is dropped, as it is for any node.
    del graph["tested"]["inputs"]["ratio"]
    graph["tested"]["inputs"]["foo"] = 3
    assert server.run(graph)["status"]["status_str"] == "success"


@pytest.mark.parametrize("kind", NODES)
def test_a_node_without_a_model_is_refused(server, kind):
    graph = NODES[kind]()
    graph["tested"]["inputs"] = {}
    assert "Required input is missing: model" in refusal(server, graph)


ANYTHING = {
    "VAE": ["loader", 2],
    "CLIP": ["loader", 1],
    "dict": ["latent", 0],
    "list": ["positive", 0],
    "Tensor": ["picture", 0],
}
"""Outputs by the type of their values."""

SOME_OPTIONS = ("ratio", "preset", "sx", "max_downsample", "merge_mlp", "scope")

TAKEN = [
    *((kind, {}, "model") for kind in NODES),
    *(("report", {}, option.name) for option in REPORT.options),
    *(
        ("patch", {"preset": preset}, name)
        for preset in ("custom", "balanced")
        for name in SOME_OPTIONS
    ),
]
WRONG = [
    *((*taken, type_) for taken, type_ in zip(TAKEN, cycle(ANYTHING), strict=False)),
    *(("report", {}, "image", type_) for type_ in ("dict", "VAE", "mask")),
    *(("patch", {}, "ratio", type_) for type_ in ANYTHING),
]
"""Inputs with a value of another type. Random graphs below have them in other combinations."""


@pytest.mark.parametrize(("kind", "inputs", "name", "type_"), WRONG, ids=str)
def test_a_value_of_another_type_over_a_link_ends_in_a_short_sentence(
    server, kind, inputs, name, type_
):
    """A tensor among them is told as such, and not number by number."""
    graph = NODES[kind](**{"model": PLAIN, **inputs, name: ["switch", 0]})
    graph["picture"] = node("EmptyImage", width=8, height=8, batch_size=2, color=5)
    # As wide as a picture has channels.
    graph["mask"] = node("SolidMask", value=0.5, width=3, height=8)
    graph["switch"] = switch(ANYTHING.get(type_, ["mask", 0]))
    message = failure(server, graph)["exception_message"].strip()
    value = f"{name}=<{'Tensor' if type_ == 'mask' else type_}>"
    assert message.startswith((f"{value} is not allowed: it must be", f"{value} does not count"))
    assert "\n" not in message and len(message) < 200


@pytest.mark.parametrize("caption", CAPTIONS)
def test_other_nodes_may_not_make_one_with_an_input_that_there_is_not(caption, sd15):
    """The host does not validate the nodes that a node creates while it runs."""
    inputs = {"samples": {}} if caption is REPORT else {}
    if caption is TUNE:
        inputs = {"positive": [], "negative": [], "latent_image": {}}
    with pytest.raises(OptionError, match=r"foo=5 is not allowed: .* has no such input"):
        getattr(nodes, caption.id).execute(**inputs | {"model": sd15, "foo": 5})


def test_a_patcher_of_no_diffusion_model_is_told_by_its_kind():
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="a Linear is no diffusion model"):
        attach(ModelPatcher(Linear(2, 2), device, device), ToMeConfig())


MADE = ("latent", "positive", "number", "any", "tome", "tuned", "removed", "report")

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["", "nan", "1", "auto", "custom", [], [1], [1, 2, 3], {}, {"a": 1}]),
    st.sampled_from(["{}", '{"preset": "fast"}', '{"sx": 3}', '{"foo": 1}', "[]", "null", "{"]),
    st.builds(lambda value: {"__value__": value}, st.sampled_from([0.5, "1", None, []])),
    # Links from anywhere, and what looks like one.
    st.builds(lambda slot: ["loader", slot], st.sampled_from([0, 1, 2, 3, -1, 0.5, "0", None])),
    st.builds(lambda name: [name, 0], st.sampled_from(MADE)),
    # Of a type that is known only when the node runs.
    st.just(["any", 0]),
    st.sampled_from([ABSENT, [5, 0], [[], 0], ["loader"], ["loader", 0, 0]]),
)

NAMES = ("foo", "links", "Ratio", "ratio ", "", "cls", "inputs", "0", "level", "st")
"""Names of inputs that most nodes do not have."""


def happens(count):
    """True once in ``count`` times."""
    return st.sampled_from([True] + [False] * (count - 1))


def sound(option):
    """Values that are allowed of an option, and take no longer than others."""
    if option.choices:
        # In Triton's interpreter, which stands in for a GPU, merging takes long.
        return st.sampled_from([str(choice) for choice in option.choices if choice != "triton"])
    if isinstance(option.default, bool):
        return st.booleans()
    if isinstance(option.default, int):
        return st.integers(int(option.least), min(int(option.most), 64))
    return st.floats(option.least, option.most)


@st.composite
def nodes_of_pack(draw, caption, **links):
    """A node of the pack with some inputs that may contradict each other, and at times junk."""
    own = {option.name: option for option in caption.options if option.name not in HOST_NAMES}
    chosen = st.lists(st.sampled_from(sorted(own)), max_size=3) if own else st.just([])
    inputs = {name: draw(sound(own[name])) for name in draw(chosen)} | links
    for name in draw(st.lists(st.sampled_from([*caption.names, *NAMES]), max_size=2)):
        inputs[name] = draw(JUNK)
    return node(caption.id, **inputs)


@st.composite
def graphs(draw):
    """Graphs of nodes of the pack, one behind the other."""
    value = draw(st.sampled_from([*ANYTHING.values(), ["number", 0], PLAIN]))
    graph = only(
        None,
        picture=node("EmptyImage", width=8, height=8, batch_size=2, color=77),
        number=node("PrimitiveFloat", value=draw(st.floats(-2, 2))),
        any=switch(value),
    )
    last = PLAIN
    for name, caption, count in (("tome", PATCH, 1), ("tuned", TUNE, 10), ("removed", REMOVE, 4)):
        if draw(happens(count)):
            links = {"model": last} | (TUNED if caption is TUNE else {})
            graph[name] = draw(nodes_of_pack(caption, **links))
            last = [name, 0]
    graph["sampler"]["inputs"]["model"] = last
    graph["report"] = draw(nodes_of_pack(REPORT, model=last, samples=["sampler", 0]))
    return graph


def end_of(server, graph):
    """How a graph ended, and the nodes that ran. An error is one of our sentences."""
    events = []
    try:
        entry = server.run(graph, events.append)
    except PromptRejected as rejected:
        assert str(rejected) and OURS not in json.dumps(rejected.node_errors)
        return "refused", set()
    except ExecutionFailed:
        error = error_among(events)
        message = error["exception_message"].strip()
        assert OURS in error["traceback"][-1]
        assert error["exception_type"].endswith(("OptionError", "OptionTypeError", "ValueError"))
        assert "\n" not in message and len(message) < 400
        return "ended in an error", set()
    assert entry["status"]["status_str"] == "success"
    return "ran", entry["seconds"].keys()


def test_no_graph_ends_in_anything_but_a_sentence_or_a_run(server):
    ends, seen, ran = set(), set(), set()
    read = len(server.log)

    # Reproducible: the same graphs in the same order each time, some of them more than once.
    @settings(max_examples=GRAPHS * 3 // 2, derandomize=True, database=None)
    @given(graphs())
    def try_graph(graph):
        seen.add(json.dumps(graph, sort_keys=True))
        end, names = end_of(server, graph)
        ends.add(end)
        ran.update(graph[name]["class_type"] for name in names)

    try_graph()
    assert len(seen) >= GRAPHS
    assert ends == {"refused", "ran", "ended in an error"}
    assert ran >= {*(caption.id for caption in CAPTIONS), "KSampler"}
    assert "on_prompt_handler" not in server.log[read:]
    # The queue is first in, first out.
    assert server.run(only(["loader", 0]))["status"]["status_str"] == "success"


@pytest.mark.parametrize(
    ("latent", "samples"),
    [
        (node("VAEEncode", pixels=["picture", 0], vae=["loader", 2]), "sampler"),
        (node("EmptyHunyuanLatentVideo", width=48, height=48, batch_size=1, length=5), "latent"),
        (node("EmptySD3LatentImage", width=48, height=48, batch_size=1), "latent"),
    ],
    ids=["of one pixel", "of a video", "of another model"],
)
def test_a_report_on_an_unusual_latent_runs(server, latent, samples):
    """Chance rarely makes a right graph of these."""
    picture = node("EmptyImage", width=8, height=8, batch_size=1, color=77)
    graph = only(None, tome=patch(), report=report(samples=samples), picture=picture)
    graph["latent"] = latent
    graph["sampler"]["inputs"]["model"] = ["tome", 0]
    assert list(server.run(graph)["outputs"]) == ["report"]
