"""The nodes through the real server's HTTP queue."""

from copy import deepcopy
from dataclasses import fields
from io import BytesIO

import pytest
from PIL import Image

from tome_nodes.settings.config import ToMeConfig
from tools.server import ExecutionFailed, PromptRejected

PLAIN = ["loader", 0]
PROMPTS = {"positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0]}


def node(class_type, **inputs):
    """A node in API format."""
    return {"class_type": class_type, "inputs": inputs}


def txt2img(model=PLAIN, nodes=None, steps=2, seed=1, side=128):
    """A small text-to-image graph in API format that samples with ``model``."""
    return {
        "loader": node("CheckpointLoaderSimple", ckpt_name="sd15.ckpt"),
        "positive": node("CLIPTextEncode", clip=["loader", 1], text="a lighthouse"),
        "negative": node("CLIPTextEncode", clip=["loader", 1], text="blurry"),
        "latent": node("EmptyLatentImage", width=side, height=side, batch_size=1),
        "sampler": node(
            "KSampler",
            model=model,
            **PROMPTS,
            seed=seed,
            steps=steps,
            cfg=5.0,
            sampler_name="euler",
            scheduler="normal",
            denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["loader", 2]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="test"),
        **(nodes or {}),
    }


def patch(model=PLAIN, **inputs):
    return node("ToMePatchModel", model=model, **inputs)


def report(model=("tome", 0), samples="sampler", **inputs):
    return node("ToMeReport", model=list(model), samples=[samples, 0], **inputs)


def tune(model, **inputs):
    return node("ToMeTune", model=model, **{**PROMPTS, **inputs})


def with_patch(**inputs):
    return txt2img(["tome", 0], {"tome": patch(**inputs)})


@pytest.fixture
def pixels(server):
    """The decoded pixels of the images that a graph saves."""

    def run(graph):
        images = server.images(server.run(graph))
        return [Image.open(BytesIO(data)).convert("RGB").tobytes() for data in images]

    return run


def test_the_nodes_are_listed_as_users_find_them(info):
    patch, remove = info["ToMePatchModel"], info["ToMeRemovePatch"]
    assert (patch["display_name"], remove["display_name"]) == (
        "ToMe Patch Model",
        "ToMe Remove Patch",
    )
    for node in patch, remove:
        assert node["category"] == "model/patch"
        assert "token merging" in node["search_aliases"]
        assert node["output"] == ["MODEL"]
        assert node["description"]


def test_inputs_have_the_defaults_of_the_config_and_a_tooltip_each(info):
    inputs = deepcopy(info["ToMePatchModel"]["input"])
    assert list(inputs["required"]) == ["model"]
    assert list(inputs["optional"]) == [
        "settings",
        *("preset", "ratio", "start_percent", "end_percent", "seed", "backend"),
        *("strategy", "scope", "attn_tokens", "max_downsample"),
        *("merge_attn", "merge_crossattn", "merge_mlp", "ratio_end"),
        *("sx", "sy", "st", "use_rand", "min_tokens", "proportional_attn"),
        "refresh_steps",
        "forecast",
    ]
    # A place for a link, not a value.
    kind, socket = inputs["optional"].pop("settings")
    assert kind == "STRING" and socket["forceInput"] and "default" not in socket
    assert set(inputs["optional"]) == {field.name for field in fields(ToMeConfig)} | {"preset"}
    for name, (_, options) in inputs["optional"].items():
        default = "balanced" if name == "preset" else getattr(ToMeConfig(), name)
        assert options["default"] == default
        assert options["tooltip"].endswith(".")
    assert inputs["optional"]["preset"][1]["options"] == [
        *("quality", "balanced", "fast", "paper", "custom")
    ]
    advanced = [name for name, (_, o) in inputs["optional"].items() if o.get("advanced")]
    assert advanced == list(inputs["optional"])[4:]


def test_a_model_alone_gives_the_same_as_a_new_node_of_the_editor(server, pixels, info):
    new = {
        name: options["default"]
        for name, (_, options) in info["ToMePatchModel"]["input"]["optional"].items()
        if "default" in options
    }
    assert new["preset"] == "balanced" and new["ratio"] == 0.6
    read = len(server.log)
    alone = pixels(with_patch())
    assert (
        "merged 6/6 blocks (256 -> 103 tokens), 2/2 steps, ratio 0.60 of keys and values"
        in server.log[read:]
    )
    assert pixels(with_patch(**new)) == alone
    assert pixels(with_patch(preset="quality")) != alone


def test_same_seed_same_image_after_the_server_forgot_the_first(server, pixels):
    first = pixels(with_patch(seed=3))
    server.post("/free", {"unload_models": True, "free_memory": True})
    assert pixels(with_patch(seed=3)) == first
    assert pixels(with_patch(seed=4)) != first


def test_ratio_zero_and_a_removed_patch_are_the_plain_image(pixels):
    plain = pixels(txt2img())
    assert pixels(with_patch(ratio=0.0)) == plain
    removed = node("ToMeRemovePatch", model=["tome", 0])
    graph = txt2img(["removed", 0], {"tome": patch(), "removed": removed})
    assert pixels(graph) == plain
    assert pixels(with_patch()) != plain


def add_plain_branch(graph, seed):
    """Also sample without the patch."""
    graph["plain_sampler"] = deepcopy(graph["sampler"])
    graph["plain_sampler"]["inputs"] |= {"model": PLAIN, "seed": seed}
    for name in ("decode", "save"):
        graph[f"plain_{name}"] = deepcopy(graph[name])
    graph["plain_decode"]["inputs"]["samples"] = ["plain_sampler", 0]
    graph["plain_save"]["inputs"]["images"] = ["plain_decode", 0]


def test_plain_and_patched_samplers_in_one_graph(pixels):
    plain, patched = pixels(txt2img(seed=8)), pixels(with_patch(ratio=0.7))
    both = with_patch(ratio=0.7)
    add_plain_branch(both, seed=8)
    assert sorted(pixels(both)) == sorted(plain + patched)


@pytest.mark.parametrize("others", [{}, {"seed": 3, "start_percent": 0.0, "end_percent": 1.0}])
@pytest.mark.parametrize(
    ("inputs", "option", "parts"),
    [
        ({"ratio": 0.96}, "ratio", ["ratio=0.96 is not allowed", "from 0.0 to 0.95"]),
        ({"ratio": float("nan")}, "ratio", ["ratio=nan is not allowed"]),
        ({"ratio": "much"}, "ratio", ["much", "FLOAT"]),
        ({"ratio": None}, "ratio", ["None", "FLOAT"]),
        ({"ratio": {"__value__": 2.0}}, "ratio", ["ratio=2.0 is not allowed"]),
        ({"seed": -1}, "seed", ["seed=-1 is not allowed", "from 0 to"]),
        ({"preset": "best"}, "preset", ["preset='best' is not allowed", "quality | balanced"]),
        ({"preset": None}, "preset", ["preset=None is not allowed"]),
        (
            {"start_percent": 0.8, "end_percent": 0.4},
            "start_percent",
            ["start_percent=0.8 is not allowed", "end_percent=0.4"],
        ),
        ({"sx": 4}, "sx", ["sx=4 does not count under preset='balanced'", "preset to 'custom'"]),
        (
            {"preset": "paper", "max_downsample": "2", "strategy": "bipartite"},
            "max_downsample",
            ["max_downsample=2 does not count under preset='paper'"],
        ),
        (
            {"preset": "custom", "max_downsample": "3"},
            "max_downsample",
            ["'3'", "auto | 1 | 2 | 4 | 8"],
        ),
    ],
    ids=str,
)
def test_one_bad_value_marks_one_input(server, inputs, option, parts, others):
    with pytest.raises(PromptRejected) as rejected:
        server.queue(with_patch(**{**others, **inputs}))
    errors = rejected.value.node_errors
    assert list(errors) == ["tome"]
    (error,) = errors["tome"]["errors"]
    assert error["extra_info"]["input_name"] == option
    for part in parts:
        assert part in error["details"] + error["message"]


def test_each_node_of_a_graph_reports_its_own_fault(server):
    graph = with_patch(ratio=2.0, seed=5)
    graph["other"] = patch(["tome", 0], sx=4, ratio=0.5)
    graph["sampler"]["inputs"]["model"] = ["other", 0]
    with pytest.raises(PromptRejected) as rejected:
        server.queue(graph)
    marked = {
        node: [error["extra_info"]["input_name"] for error in each["errors"]]
        for node, each in rejected.value.node_errors.items()
    }
    assert marked == {"tome": ["ratio"], "other": ["sx"]}


def test_of_two_branches_the_good_one_runs_and_the_other_is_refused(server, pixels):
    """A graph is refused as a whole only if nothing in it can run."""
    graph = with_patch(ratio=2.0, end_percent=0.9)
    add_plain_branch(graph, seed=11)
    answer = server.post("/prompt", {"prompt": graph})
    (error,) = answer["node_errors"]["tome"]["errors"]
    assert error["extra_info"]["input_name"] == "ratio"
    assert "ratio=2.0 is not allowed" in error["details"]
    assert answer["node_errors"]["tome"]["dependent_outputs"] == ["save"]
    graph["plain_sampler"]["inputs"]["seed"] = 12
    assert pixels(graph) == pixels(txt2img(seed=12))


@pytest.mark.parametrize(
    ("option", "number", "sentence"),
    [
        ("ratio", node("PrimitiveFloat", value=1.5), r"ratio=1\.5 is not allowed: it must be from"),
        ("sx", node("PrimitiveInt", value=4), "sx=4 does not count under preset='balanced'"),
    ],
    ids=["ratio", "sx"],
)
def test_a_bad_value_that_comes_over_a_link_stops_the_run_with_our_sentence(
    server, option, number, sentence
):
    tome = patch(**{option: ["number", 0]})
    with pytest.raises(ExecutionFailed, match=sentence):
        server.run(txt2img(["tome", 0], {"tome": tome, "number": number}))
