"""Bad graphs through the real server: each is refused or ends in a sentence, and the queue goes on.

Some bad graphs are beyond any pack: the host answers HTTP 500 or loses the thread of its queue when
one of its own nodes has no ``inputs``, or a wrapped list that looks like a link to no node. Only
nodes of the pack get such inputs here.
"""

import json

import pytest
import torch
from comfy.model_patcher import ModelPatcher
from hypothesis import given, settings
from hypothesis import strategies as st
from models.comfyui import FLUX, build_class
from safetensors.torch import save_file
from test_server import PLAIN, PROMPTS, node, patch, report, txt2img

from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.node_texts import CAPTIONS, PATCH, REMOVE, REPORT, TUNE
from tome_nodes.comfyui.nodes import ToMePatchModel, ToMeRemovePatch, ToMeReport, ToMeTune
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.options import OptionError
from tome_nodes.settings.presets import FREE, PRESET, PRESETS
from tools.server import ExecutionFailed, PromptRejected

GRAPHS = 500
OURS = "custom_nodes/tome-nodes/tome_nodes"
TRANSFORMER = "bad_input_flux.safetensors"
OUR_NAMES = ("tome", "second", "tuned", "removed", "report")

# What the loader recognises as a Flux takes the prompts of a Stable Diffusion 1.x.
TINY_FLUX = FLUX | {
    "image_model": "flux",
    "guidance_embed": True,
    **{"hidden_size": 128, "num_heads": 1, "axes_dim": [16, 56, 56], "mlp_ratio": 4.0},
    **{"context_in_dim": 768, "vec_in_dim": 768, "depth": 1, "depth_single_blocks": 1},
}


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
    """What the server tells of the error in which a run ends."""
    events = []
    with pytest.raises(ExecutionFailed):
        server.run(graph, events.append)
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


@pytest.mark.parametrize("value", ["text", 5, float("nan"), {"a": 1}, {"__value__": ABSENT}])
@pytest.mark.parametrize(("kind", "name", "type_"), NOT_A_LINK)
def test_a_value_in_place_of_a_link_is_refused(server, kind, name, type_, value):
    shown = "<dict>" if isinstance(value, dict) else repr(value)
    assert refusal(server, NODES[kind](**{"model": PLAIN, name: value})) == [
        f"Custom validation failed for node: links - {name}={shown} is not allowed: "
        f"it must be a link to an output of type {type_}"
    ]


@pytest.mark.parametrize("link", [["latent", 0], ABSENT], ids=["to a node", "to no node"])
@pytest.mark.parametrize(("kind", "caption"), KINDS)
def test_a_link_to_an_input_that_there_is_not_is_refused(server, kind, caption, link):
    """The host would follow it without looking whether there is such a node."""
    (message,) = refusal(server, NODES[kind](model=PLAIN, foo=link, bar=3))
    assert f"foo={link} is not allowed: {caption.name} has no such input; it has model" in message


@pytest.mark.parametrize("kind", NODES)
def test_a_value_for_an_input_that_there_is_not_does_nothing(server, kind):
    """The host drops it, as it does for any node."""
    entry = server.run(NODES[kind](model=PLAIN, foo=3))
    assert entry["status"]["status_str"] == "success"


def test_a_refused_link_is_the_only_fault_that_is_told(server):
    graph = NODES["patch"](model=PLAIN, ratio=2.0, sx=["absent", 3], foo=["latent", 0])
    (message,) = refusal(server, graph)
    assert "foo=" in message


@pytest.mark.parametrize("inputs", [None, [], "text", ...], ids=str)
@pytest.mark.parametrize("kind", NODES)
def test_a_node_without_inputs_is_refused(server, kind, inputs):
    graph = NODES[kind]()
    if inputs is ...:
        del graph["tested"]["inputs"]
    else:
        graph["tested"]["inputs"] = inputs
    assert "Required input is missing: model" in refusal(server, graph)


def test_beside_a_node_without_inputs_the_rest_of_a_graph_runs(server):
    graph = only(["sampler", 0], tome=patch(), report={"class_type": REPORT.id})
    graph["sampler"]["inputs"]["model"] = ["tome", 0]
    assert list(server.run(graph)["outputs"]) == ["shown"]


ANYTHING = {
    "VAE": ["loader", 2],
    "CLIP": ["loader", 1],
    "dict": ["latent", 0],
    "list": ["positive", 0],
    "Tensor": ["picture", 0],
}
"""Outputs by the type of their values."""

SOME_OPTIONS = ("ratio", "preset", "sx", "max_downsample", "merge_mlp", "scope")

WRONG = [
    *((kind, {}, "model", type_) for kind in NODES for type_ in ANYTHING),
    *(("report", {}, "image", type_) for type_ in ("dict", "VAE", "mask")),
    *(("report", {}, each.name, type_) for each in REPORT.options for type_ in ANYTHING),
    *(
        ("patch", {"preset": preset}, name, type_)
        for preset in ("custom", "balanced")
        for name in SOME_OPTIONS
        for type_ in ANYTHING
    ),
]


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


@pytest.mark.parametrize(
    ("call", "inputs"),
    [
        (ToMePatchModel, {}),
        (ToMeTune, {"positive": [], "negative": [], "latent_image": {}}),
        (ToMeRemovePatch, {}),
        (ToMeReport, {"samples": {}}),
    ],
)
def test_other_nodes_may_not_make_one_with_an_input_that_there_is_not(call, inputs, sd15):
    """The host does not validate the nodes that a node creates while it runs."""
    with pytest.raises(OptionError, match=r"foo=5 is not allowed: .* has no such input"):
        call.execute(model=sd15, foo=5, **inputs)


def test_a_patcher_of_no_diffusion_model_is_told_by_its_kind():
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="does not work with a Linear: it is no diffusion model"):
        attach(ModelPatcher(torch.nn.Linear(2, 2), device, device), ToMeConfig())


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["", "nan", "1", "auto", "custom", [], [1], [1, 2, 3], {}, {"a": 1}]),
    st.builds(lambda value: {"__value__": value}, st.sampled_from([0.5, "1", None, [], ABSENT])),
)
"""What an input may be in JSON."""

LINKS = st.sampled_from(
    [
        *(["loader", slot] for slot in (0, 1, 2, 3, -1, 0.5, "0", None, True)),
        *([name, 0] for name in ("latent", "positive", "number", "switch", "picture", "sampler")),
        *([name, 0] for name in OUR_NAMES),
        *(ABSENT, [5, 0], [[], 0], ["loader"], ["loader", 0, 0]),
    ]
)
"""Links from anywhere, and what looks like one."""

NAMES = ("foo", "links", "Ratio", "ratio ", "", "cls", "inputs", "0", "level", "st")
"""Names of inputs that most nodes do not have."""


def one_in(count, unusual, usual):
    """Draws from ``unusual`` once in ``count`` times."""
    return st.sampled_from([unusual] + [usual] * (count - 1)).flatmap(lambda chosen: chosen)


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


def some_of(strategies):
    return st.fixed_dictionaries({}, optional=strategies)


ANY = {option.name: sound(option) for option in PATCH.options} | {
    "settings": st.sampled_from(
        [
            *("{}", '{"preset": "fast", "ratio": 0.5}', '{"ratio": 0}', '{"preset": "custom"}'),
            *('{"sx": 3}', '{"ratio": 9}', '{"foo": 1}', '{"model": 1}', "[]", "7", "null", "{"),
        ]
    ),
}
"""Each input of a patch node for itself; they may contradict each other."""

SOUND = {name: ANY[name] for name in ANY if name != "settings"} | {
    "start_percent": st.floats(0, 0.4),
    "end_percent": st.floats(0.5, 1),
    "sx": st.integers(2, 8),
    "min_tokens": st.sampled_from([0, 1]),
}
UNDER_PRESETS = st.fixed_dictionaries(
    {"preset": st.sampled_from([*PRESETS])}, optional={name: SOUND[name] for name in FREE}
)
UNDER_CUSTOM = some_of(SOUND).map(lambda inputs: inputs | {"preset": "custom"})


def sound_inputs(caption, **others):
    options = [option for option in caption.options if not option.is_of_host]
    return some_of({option.name: sound(option) for option in options} | others)


USUAL = {
    PATCH.id: one_in(5, some_of(ANY), UNDER_PRESETS | UNDER_CUSTOM),
    TUNE.id: sound_inputs(TUNE, steps=st.integers(1, 2)).map(lambda inputs: TUNED | inputs),
    REMOVE.id: st.just({}),
    REPORT.id: sound_inputs(REPORT, image=st.just(["picture", 0])),
}
"""The inputs of the nodes without their links, by class."""


@st.composite
def nodes_of_pack(draw, caption, **links):
    """A node of the pack that has these links, with inputs most of which are right."""
    inputs = links | draw(USUAL[caption.id])
    for _ in range(draw(one_in(5, st.sampled_from([1, 3]), st.just(0)))):
        inputs[draw(st.sampled_from([*caption.names, *NAMES]))] = draw(JUNK | LINKS)
    made = node(caption.id, **inputs)
    if draw(happens(40)):
        del made["inputs"]
    return made


def nodes_of(class_type, **inputs):
    """Nodes of a class with inputs that are drawn."""
    return st.builds(node, st.just(class_type), **inputs)


SIDE, COUNT, LENGTH = st.integers(16, 72), st.integers(1, 3), st.sampled_from([1, 5, 9])
UNUSUAL_LATENTS = st.one_of(
    # Five dimensions, and channels that Stable Diffusion does not have.
    nodes_of("EmptyHunyuanLatentVideo", width=SIDE, height=SIDE, length=LENGTH, batch_size=COUNT),
    nodes_of("EmptySD3LatentImage", width=SIDE, height=SIDE, batch_size=COUNT),
    st.sampled_from(
        [
            # Of a picture of 8 pixels, one.
            node("VAEEncode", pixels=["picture", 0], vae=["loader", 2]),
            # Three dimensions.
            node("EmptyLatentAudio", seconds=1.0, batch_size=1),
        ]
    ),
)
USUAL_LATENTS = nodes_of("EmptyLatentImage", width=SIDE, height=SIDE, batch_size=COUNT)

PICTURE_SIDE = st.sampled_from([1, 8, 15, 33])
PICTURES = nodes_of(
    "EmptyImage", width=PICTURE_SIDE, height=PICTURE_SIDE, batch_size=COUNT, color=st.just(77)
)

NUMBERS = st.one_of(
    nodes_of("PrimitiveFloat", value=st.floats(-2, 2)),
    nodes_of("PrimitiveInt", value=st.integers(-5, 70)),
    nodes_of("PrimitiveBoolean", value=st.booleans()),
    nodes_of("PrimitiveString", value=st.text(max_size=4)),
)

MODELS = one_in(
    6, JUNK | LINKS, one_in(5, st.just(["switch", 0]), st.sampled_from([PLAIN, PLAIN, ["flux", 0]]))
)


@st.composite
def graphs(draw):
    """Graphs around the nodes of the pack, about a third of them right."""
    nodes = {
        "picture": draw(PICTURES),
        "number": draw(NUMBERS),
        "switch": switch(draw(st.sampled_from([*ANYTHING.values(), ["number", 0], PLAIN]))),
        "flux": node("UNETLoader", unet_name=TRANSFORMER, weight_dtype="default"),
    }
    last = draw(MODELS)
    kinds = {"tome": (PATCH, 1), "second": (PATCH, 4), "tuned": (TUNE, 10), "removed": (REMOVE, 4)}
    for name, (caption, count) in kinds.items():
        if draw(happens(count)):
            nodes[name] = draw(nodes_of_pack(caption, model=last))
            last = [name, 0]
    outputs = draw(st.sampled_from(["model", "model", "model", "samples", "report", "all"]))
    # The node that shows the model does not sample.
    graph = only(last if outputs in ("model", "all") else None, **nodes)
    graph["latent"] = draw(one_in(2, UNUSUAL_LATENTS, USUAL_LATENTS))
    graph["sampler"]["inputs"]["model"] = last
    if outputs in ("samples", "all"):
        graph["decode"] = node("VAEDecode", samples=["sampler", 0], vae=["loader", 2])
        graph["save"] = node("PreviewImage", images=["decode", 0])
    if outputs in ("report", "all"):
        samples = [draw(st.sampled_from(["sampler", "latent"])), 0]
        graph["report"] = draw(nodes_of_pack(REPORT, model=last, samples=samples))
    return graph


def without_the_pack(graph):
    """The graph with the models that the nodes of the pack got; latents in place of reports."""
    patching = {caption.id for caption in (PATCH, TUNE, REMOVE)}
    kept = {TUNE.id: "latent_image", REPORT.id: "samples"}

    def source(link):
        while isinstance(link, list) and graph[link[0]]["class_type"] in patching:
            link = graph[link[0]].get("inputs", {}).get("model")
        return link

    plain = {}
    for name, each in graph.items():
        class_type, inputs = each["class_type"], each.get("inputs", {})
        if class_type in kept:
            plain[name] = node("PreviewAny", source=inputs.get(kept[class_type]))
        elif class_type not in patching:
            linked = {key: source(inputs[key]) for key in ("model", "source") if key in inputs}
            plain[name] = node(class_type, **inputs | linked)
    return plain


def end_of(server, graph):
    """How a graph ended, and the nodes that ran. An error is one of our sentences or the host's.

    A run without the nodes of the pack ends in the same error if it is the host's.
    """
    events = []
    try:
        entry = server.run(graph, events.append)
    except PromptRejected as rejected:
        assert str(rejected) and OURS not in json.dumps(rejected.node_errors)
        return "refused", set()
    except ExecutionFailed:
        (error,) = (event["data"] for event in events if event["type"] == "execution_error")
        message = error["exception_message"].strip()
        if OURS in error["traceback"][-1]:
            assert error["exception_type"].endswith(
                ("OptionError", "OptionTypeError", "ValueError")
            )
            assert "\n" not in message and len(message) < 400
            return "ended in our error", set()
        same = failure(server, without_the_pack(graph))
        assert (same["node_id"], same["exception_message"].strip()) == (error["node_id"], message)
        return "ended in the host's error", set()
    assert entry["status"]["status_str"] == "success"
    return "ran", entry["seconds"].keys()


@pytest.fixture(scope="module")
def transformer(server):
    """A transformer among the server's files."""
    file = server.base / "models" / "diffusion_models" / TRANSFORMER
    weights = build_class("Flux", TINY_FLUX).model.diffusion_model.state_dict()
    file.parent.mkdir(exist_ok=True)
    save_file({name: weight.half() for name, weight in weights.items()}, file)
    yield
    file.unlink()


def test_no_graph_ends_in_anything_but_a_sentence_or_a_run(server, transformer):
    ends, seen, ran = set(), set(), set()
    read = len(server.log)

    # Reproducible: the same graphs in the same order each time, some of them more than once.
    @settings(max_examples=GRAPHS * 3 // 2, derandomize=True, database=None)
    @given(graphs())
    def each(graph):
        seen.add(json.dumps(graph, sort_keys=True))
        end, names = end_of(server, graph)
        ends.add(end)
        for ended in map(graph.get, names):
            ran.add(ended["class_type"])
            if ended["class_type"] == PATCH.id:
                ran.add(str(ended["inputs"].get("preset", PRESET.default)))

    each()
    assert len(seen) >= GRAPHS
    assert ends == {"refused", "ran", "ended in our error", "ended in the host's error"}
    ours = {caption.id for caption in CAPTIONS}
    assert ran >= {*PRESET.choices, *ours, "EmptyLatentImage", "UNETLoader", "KSampler"}
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
