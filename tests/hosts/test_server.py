"""The nodes through the real server's HTTP queue."""

import re
from io import BytesIO

import pytest
from every_option import EVERY_OPTION
from PIL import Image

from tools.editor import graph_of, workflow_files
from tools.server import ExecutionFailed, PromptRejected

PLAIN = ["loader", 0]
PROMPTS = {"positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0]}


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def txt2img(model=PLAIN, nodes=None, steps=1, seed=1, side=256):
    """A small text-to-image graph in API format that samples with ``model``."""
    run = {"seed": seed, "steps": steps, "cfg": 1.0, "denoise": 1.0}
    run |= {"sampler_name": "euler", "scheduler": "normal"}
    return {
        "loader": node("CheckpointLoaderSimple", ckpt_name="sd15.ckpt"),
        "positive": node("CLIPTextEncode", clip=["loader", 1], text="a lighthouse"),
        "negative": node("CLIPTextEncode", clip=["loader", 1], text="blurry"),
        "latent": node("EmptyLatentImage", width=side, height=side, batch_size=1),
        "sampler": node("KSampler", model=model, **PROMPTS, **run),
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


def saved_pixels(server, entry):
    images = server.images(entry)
    return [Image.open(BytesIO(data)).convert("RGB").tobytes() for data in images]


@pytest.fixture
def pixels(server):
    return lambda graph: saved_pixels(server, server.run(graph))


PATCH_OPTIONS = ["preset", *EVERY_OPTION]
TUNE_LINKS = ["model", "positive", "negative", "latent_image"]
TUNE_OPTIONS = [
    *("goal", "speed_up", "change"),
    *("seed", "steps", "cfg", "sampler_name", "scheduler", "denoise", "measure_again"),
]
REPORT_INPUTS = ["image", "view", "level", "step", "frame"]
ADVANCED = {
    "ToMePatchModel": PATCH_OPTIONS[4:],
    "ToMeTune": ["goal", "change"],
    "ToMeReport": REPORT_INPUTS[2:],
}


@pytest.mark.parametrize(
    ("id_", "name", "required", "optional", "outputs", "alias"),
    [
        ("ToMePatchModel", "Patch Model", ["model"], ["settings", *PATCH_OPTIONS], "MODEL", "fast"),
        ("ToMeRemovePatch", "Remove Patch", ["model"], [], "MODEL", "token merging"),
        ("ToMeTune", "Tune", TUNE_LINKS, TUNE_OPTIONS, "MODEL IMAGE text settings", "benchmark"),
        ("ToMeReport", "Report", ["model", "samples"], REPORT_INPUTS, "IMAGE STRING", "merge map"),
    ],
)
def test_the_nodes_are_listed_as_users_find_them(
    info, id_, name, required, optional, outputs, alias
):
    """Workflow files hold the ids of nodes, and the names and the order of inputs."""
    node = info[id_]
    inputs = node["input"].get("optional", {})
    assert node["display_name"] == f"ToMe {name}"
    assert node["category"] == "model/patch"
    assert {"token merging", alias} <= {*node["search_aliases"]}
    assert node["output_name"] == outputs.split()
    assert node["output_node"] == (name in ("Tune", "Report"))
    assert node["description"]
    assert [*node["input"]["required"]] == required
    assert [*inputs] == optional
    advanced = [name for name, (_, given) in inputs.items() if given.get("advanced")]
    assert advanced == ADVANCED.get(id_, [])


def test_the_templates_are_listed_and_served(server):
    """ComfyUI looks for them in folders of certain names; the twins in ``api`` are no templates."""
    files = {file.stem: file for file in workflow_files()}
    assert sorted(server.get("/workflow_templates")["tome-nodes"]) == [*files]
    # Front ends find a template by its name, whichever pack it is from.
    assert all(name.startswith("tome_") for name in files)
    for name, file in files.items():
        served = server.get(f"/api/workflow_templates/tome-nodes/{name}.json")
        assert served == graph_of(file)


def test_inputs_have_the_defaults_of_the_config_and_the_choices_of_the_host(info):
    ours, theirs = info["ToMeTune"]["input"]["optional"], info["KSampler"]["input"]["required"]
    for name in "sampler_name", "scheduler":
        assert ours[name][1]["options"] == theirs[name][0]
    inputs = dict(info["ToMePatchModel"]["input"]["optional"])
    # A place for a link, not a value.
    kind, socket = inputs.pop("settings")
    assert kind == "STRING" and socket["forceInput"] and "default" not in socket
    defaults = {name: case.default for name, case in EVERY_OPTION.items()}
    defaults["preset"] = "balanced"
    assert {name: given["default"] for name, (_, given) in inputs.items()} == defaults
    assert all(given["tooltip"].endswith(".") for _, given in inputs.values())
    assert inputs["preset"][1]["options"] == ["balanced", "fast", "paper", "custom"]


def test_a_model_alone_gives_the_same_as_a_new_node_of_the_editor(server, pixels, info):
    inputs = info["ToMePatchModel"]["input"]["optional"].items()
    new = {name: given["default"] for name, (_, given) in inputs if "default" in given}
    assert new["preset"] == "balanced" and new["ratio"] == 0.6
    read = len(server.log)
    alone = pixels(with_patch())
    assert (
        "merged 4/4 blocks (1024 -> 408 tokens), 1/1 steps, ratio 0.60 of keys and values"
        in server.log[read:]
    )
    assert pixels(with_patch(**new)) == alone
    assert pixels(with_patch(preset="fast")) != alone


def test_same_settings_same_image_after_the_server_forgot_the_first(server, pixels):
    first = pixels(with_patch(seed=3))
    server.post("/free", {"unload_models": True, "free_memory": True})
    assert pixels(with_patch(seed=3)) == first
    assert pixels(with_patch(seed=4)) != first
    plain = pixels(txt2img())
    assert pixels(with_patch(ratio=0.0)) == plain != first
    removed = {"tome": patch(), "removed": node("ToMeRemovePatch", model=["tome", 0])}
    assert pixels(txt2img(["removed", 0], removed)) == plain


def test_settings_count_in_place_of_the_other_inputs(server, pixels):
    def of(**inputs):
        graph = txt2img(["tome", 0], {"tome": patch(**inputs)}, seed=37, side=224)
        return pixels(graph)

    read = len(server.log)
    expected = of(preset="fast", ratio=0.5)
    assert "merged 4/4 blocks (784 -> 392 tokens)" in server.log[read:]
    given = '{"preset": "fast", "ratio": 0.5}'
    assert of(settings=given) == of(settings=given, preset="balanced", ratio=0.1) == expected
    assert of(settings=given, preset="custom", sx=4, min_tokens=1) == expected
    assert of(settings='{"ratio": 0.5}', preset="fast", ratio=0.1) == expected
    for nothing in ("{}", "", " ", "None", None):
        assert of(settings=nothing, preset="fast", ratio=0.5) == expected
    assert of(settings='{"ratio": 0.5, "max_downsample": "auto"}', preset="fast") == expected
    assert of(settings={"__value__": '{"preset": "fast", "ratio": 0.5}'}) == expected


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"ratio": 0.96}, "ratio=0.96 is not allowed: it must be from 0.0 to 0.95"),
        ({"ratio": float("nan")}, "ratio=nan is not allowed"),
        ({"ratio": "much"}, "ratio, much, could not convert string to float"),
        ({"ratio": None}, "ratio, None, "),
        ({"ratio": {"__value__": 2.0}}, "ratio=2.0 is not allowed"),
        ({"seed": -1}, "seed=-1 is not allowed: it must be from 0 to"),
        ({"seed": float("inf")}, "seed, inf, cannot convert float infinity to integer"),
        ({"preset": "best"}, "preset='best' is not allowed: it must be one of balanced | fast"),
        ({"attn_tokens": "q", "preset": "custom"}, "attn_tokens='q' is not allowed"),
        (
            {"start_percent": 0.8, "end_percent": 0.4},
            "start_percent=0.8 is not allowed: it must not be greater than end_percent=0.4",
        ),
        (
            {"sx": 4},
            "sx=4 does not count under preset='balanced', which decides it: leave sx out, or set "
            "preset to 'custom'",
        ),
        (
            {"max_downsample": "2", "preset": "paper", "strategy": "bipartite"},
            "max_downsample=2 does not count under preset='paper'",
        ),
        ({"max_downsample": "3", "preset": "custom"}, "one of auto | 1 | 2 | 4 | 8"),
        # It has no hash.
        ({"max_downsample": {"a": 1}}, "max_downsample=<dict> does not count"),
        ({"settings": "{"}, "is not allowed: it is not JSON"),
        ({"settings": "[1]"}, "is not allowed: it must be a JSON object of inputs by name"),
        ({"settings": '{"foo": 1}'}, "is not allowed: there is no foo; there are preset, ratio"),
        ({"settings": '{"ratio": 2}'}, "ratio=2 is not allowed: it must be from 0.0 to 0.95"),
        ({"settings": '{"preset": "slow"}'}, "preset='slow' is not allowed: it must be one of"),
        ({"settings": '{"preset": "fast", "sx": 3}'}, "sx=3 does not count under preset='fast'"),
        ({"settings": 7}, "settings='7' is not allowed: it must be a JSON object of inputs"),
        ({"settings": {"__value__": '{"ratio": 2}'}}, "ratio=2 is not allowed"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_one_message_of_each_side(server, inputs, sentence):
    """Of the host at the input, if it checks such a value; of ours at the model."""
    good = {"seed": 3, "start_percent": 0.0, "end_percent": 1.0}
    with pytest.raises(PromptRejected) as rejected:
        server.queue(with_patch(**{**good, **inputs}))
    ((name, report),) = rejected.value.node_errors.items()
    errors = {error["extra_info"]["input_name"]: error["details"] for error in report["errors"]}
    assert name == "tome" and {*errors} <= {next(iter(inputs)), "model"}
    assert sentence in [*errors.values()][-1]
    assert "on_prompt_handler" not in server.log


def test_each_node_reports_its_own_fault_and_a_good_branch_of_the_graph_runs(server, pixels):
    """A graph is refused as a whole only if nothing in it can run."""
    graph = with_patch(ratio=2.0, end_percent=0.9)
    graph["other"] = patch(["tome", 0], sx=4, ratio=0.5)
    graph["sampler"]["inputs"]["model"] = ["other", 0]
    plain = txt2img(seed=11)
    for name in "sampler", "decode", "save":
        graph[f"plain_{name}"] = plain[name]
    graph["plain_decode"]["inputs"]["samples"] = ["plain_sampler", 0]
    graph["plain_save"]["inputs"]["images"] = ["plain_decode", 0]
    reports = server.post("/prompt", {"prompt": graph})["node_errors"]
    assert reports.keys() == {"tome", "other"}
    for name, fault in ("tome", "ratio=2.0 is not allowed"), ("other", "sx=4 does not count"):
        assert reports[name]["dependent_outputs"] == ["save"]
        assert fault in reports[name]["errors"][-1]["details"]
    graph["plain_sampler"]["inputs"]["seed"] = 12
    assert pixels(graph) == pixels(txt2img(seed=12))


@pytest.mark.parametrize(
    ("option", "source", "sentence"),
    [
        ("ratio", node("PrimitiveFloat", value=1.5), "ratio=1.5 is not allowed: it must be from"),
        ("sx", node("PrimitiveInt", value=4), "sx=4 does not count under preset='balanced'"),
        (
            *("settings", node("PrimitiveString", value='{"ratio": 2}')),
            "settings='{\"ratio\": 2}': ratio=2 is not allowed",
        ),
    ],
    ids=["ratio", "sx", "settings"],
)
def test_a_bad_value_that_comes_over_a_link_stops_the_run_with_our_sentence(
    server, option, source, sentence
):
    tome = patch(**{option: ["source", 0]})
    with pytest.raises(ExecutionFailed, match=re.escape(sentence)):
        server.run(txt2img(["tome", 0], {"tome": tome, "source": source}))
