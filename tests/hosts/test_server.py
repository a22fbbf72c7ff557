"""The nodes through the real server's HTTP queue."""

import json
from copy import deepcopy
from dataclasses import fields
from io import BytesIO

import pytest
from PIL import Image

from tome_nodes.config import ToMeConfig
from tools.server import ExecutionFailed, PromptRejected

PLAIN = ["loader", 0]


def txt2img(model=PLAIN, nodes=None, steps=2, seed=1):
    """A small text to image graph in API format that samples with ``model``."""
    return {
        "loader": {
            "class_type": "CheckpointLoaderSimple",
            "inputs": {"ckpt_name": "sd15.ckpt"},
        },
        "positive": {
            "class_type": "CLIPTextEncode",
            "inputs": {"clip": ["loader", 1], "text": "a lighthouse"},
        },
        "negative": {
            "class_type": "CLIPTextEncode",
            "inputs": {"clip": ["loader", 1], "text": "blurry"},
        },
        "latent": {
            "class_type": "EmptyLatentImage",
            "inputs": {"width": 128, "height": 128, "batch_size": 1},
        },
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": model,
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "latent_image": ["latent", 0],
                "seed": seed,
                "steps": steps,
                "cfg": 5.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        },
        "decode": {
            "class_type": "VAEDecode",
            "inputs": {"samples": ["sampler", 0], "vae": ["loader", 2]},
        },
        "save": {
            "class_type": "SaveImage",
            "inputs": {"images": ["decode", 0], "filename_prefix": "test"},
        },
        **(nodes or {}),
    }


def patch(model=PLAIN, **inputs):
    return {"class_type": "ToMePatchModel", "inputs": {"model": model, **inputs}}


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
        assert node["category"] == "model/patch/unet"
        assert {"token merging", "tomesd", "speed"} <= set(node["search_aliases"])
        assert node["output"] == ["MODEL"]
        assert node["description"]


def test_inputs_have_the_defaults_of_the_config_and_a_tooltip_each(info):
    inputs = info["ToMePatchModel"]["input"]
    assert list(inputs["required"]) == ["model"]
    assert list(inputs["optional"]) == [
        *("ratio", "preset", "max_downsample", "merge_attn", "merge_crossattn", "merge_mlp"),
        *("sx", "sy", "use_rand", "seed", "start_percent", "end_percent"),
        *("strategy", "scope", "attn_tokens", "reuse_steps", "ratio_end", "min_tokens", "backend"),
        *("kv_ratio", "proportional_attn"),
    ]
    assert set(inputs["optional"]) == {field.name for field in fields(ToMeConfig)} | {"preset"}
    for name, (_, options) in inputs["optional"].items():
        default = "balanced" if name == "preset" else getattr(ToMeConfig(), name)
        assert options["default"] == default
        assert options["tooltip"].endswith(".")
    assert inputs["optional"]["preset"][1]["options"] == [
        *("quality", "balanced", "fast", "paper", "custom")
    ]
    assert "1 - 1/(sx*sy)" in inputs["optional"]["ratio"][1]["tooltip"]
    advanced = [name for name, (_, o) in inputs["optional"].items() if o.get("advanced")]
    assert advanced == list(inputs["optional"])[6:]


def test_model_alone_is_enough(server, pixels):
    assert pixels(with_patch()) == pixels(with_patch(ratio=0.5, max_downsample="auto"))
    assert "[ToMe] merged 6/6 blocks (256 -> 128 tokens), 2/2 steps, ratio 0.50" in server.log


def test_same_seed_same_image_after_the_server_forgot_the_first(server, pixels):
    first = pixels(with_patch(seed=3))
    server.post("/free", {"unload_models": True, "free_memory": True})
    assert pixels(with_patch(seed=3)) == first
    assert pixels(with_patch(seed=4)) != first


def test_ratio_zero_and_a_removed_patch_are_the_plain_image(pixels):
    plain = pixels(txt2img())
    assert pixels(with_patch(ratio=0.0)) == plain
    removed = {"class_type": "ToMeRemovePatch", "inputs": {"model": ["tome", 0]}}
    graph = txt2img(["removed", 0], {"tome": patch(), "removed": removed})
    assert pixels(graph) == plain
    assert pixels(with_patch()) != plain


def test_plain_and_patched_samplers_in_one_graph(pixels):
    plain, patched = pixels(txt2img(seed=8)), pixels(with_patch(ratio=0.7))
    both = with_patch(ratio=0.7)
    both["plain_sampler"] = deepcopy(both["sampler"])
    both["plain_sampler"]["inputs"] |= {"model": PLAIN, "seed": 8}
    for name in ("decode", "save"):
        both[f"plain_{name}"] = deepcopy(both[name])
    both["plain_decode"]["inputs"]["samples"] = ["plain_sampler", 0]
    both["plain_save"]["inputs"]["images"] = ["plain_decode", 0]
    assert sorted(pixels(both)) == sorted(plain + patched)


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ({"ratio": 0.96}, ["ratio=0.96 is not allowed", "from 0.0 to 0.95"]),
        ({"ratio": -0.1}, ["ratio=-0.1 is not allowed"]),
        ({"ratio": float("nan")}, ["ratio=nan is not allowed"]),
        ({"ratio": "much"}, ["ratio", "much", "FLOAT"]),
        ({"sx": 1, "sy": 1}, ["sx=1 with sy=1 is not allowed", "sx or sy must be at least 2"]),
        ({"sx": 9}, ["sx=9 is not allowed", "from 1 to 8"]),
        ({"sy": 0}, ["sy=0 is not allowed"]),
        (
            {"start_percent": 0.8, "end_percent": 0.4},
            ["start_percent=0.8 is not allowed", "end_percent=0.4"],
        ),
        ({"end_percent": float("inf")}, ["end_percent=inf is not allowed"]),
        ({"max_downsample": "3"}, ["max_downsample", "'3'", "['auto', '1', '2', '4', '8']"]),
        ({"seed": -1}, ["seed", "-1", "min of 0"]),
        ({"ratio_end": -0.5}, ["ratio_end=-0.5 is not allowed", "-1, to keep ratio"]),
        ({"strategy": "kmeans"}, ["strategy", "'kmeans'", "['bipartite', 'window', "]),
    ],
    ids=str,
)
def test_bad_values_are_refused_before_anything_runs(server, inputs, parts):
    with pytest.raises(PromptRejected) as rejected:
        server.queue(with_patch(**inputs))
    errors = rejected.value.node_errors
    assert list(errors) == ["tome"]
    told = json.dumps(errors["tome"]["errors"])
    for part in parts:
        assert part in told


def test_a_refused_graph_loses_nothing(server, pixels):
    before = pixels(with_patch(ratio=0.25))
    with pytest.raises(PromptRejected):
        server.queue(with_patch(ratio=2.0))
    assert pixels(with_patch(ratio=0.25)) == before


def test_a_bad_value_that_comes_over_a_link_stops_the_run_with_our_sentence(server):
    number = {"class_type": "PrimitiveFloat", "inputs": {"value": 1.5}}
    graph = txt2img(["tome", 0], {"tome": patch(ratio=["number", 0]), "number": number})
    with pytest.raises(
        ExecutionFailed, match=r"ratio=1\.5 is not allowed: it must be from 0\.0 to"
    ):
        server.run(graph)
