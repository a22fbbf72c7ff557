"""Small graphs as people share them, on the real server, with the node in any place."""

import copy
import re

import pytest
import torch
from test_server import node, patch, saved_pixels, txt2img

from tome_nodes import reasons

LAYER = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def files(server):
    """A ControlNet, two LoRAs and a model that upscales, where their loaders look for them."""
    from comfy.cldm.cldm import ControlNet
    from models import checkpoints
    from spandrel.architectures.ESRGAN import ESRGAN

    def save(weights, *path):
        file = server.base.joinpath("models", *path)
        file.parent.mkdir(exist_ok=True)
        torch.save(weights, file)

    settings = checkpoints.unet_of("sd15", 1, full_width=False)
    del settings["out_channels"]
    layout = checkpoints._layout("", lambda: ControlNet(**settings, hint_channels=3))
    save(checkpoints._random_weights(layout), "controlnet", "control.pth")
    save(ESRGAN(num_filters=8, num_blocks=1, scale=2).state_dict(), "upscale_models", "twice.pth")
    for name in "one", "two":
        lora = {"lora_up.weight": torch.ones(320, 1), "lora_down.weight": torch.randn(1, 320)}
        save({f"{LAYER}.{part}": weight for part, weight in lora.items()}, "loras", f"{name}.pt")


def sampler(latent, model=("loader", 0), conditions=("positive", "negative"), **inputs):
    positive, negative = conditions
    run = {"seed": 3, "steps": 1, "cfg": 1.0, "denoise": 1.0, "sampler_name": "euler"}
    links = {"model": [*model], "latent_image": [*latent], "scheduler": "normal"}
    links |= {"positive": [positive, 0], "negative": [negative, 0]}
    return node("KSampler", **{**run, **links, **inputs})


def decoded(latent="sampler"):
    return node("VAEDecode", samples=[latent, 0], vae=["loader", 2])


def encoded(pixels="picture"):
    return node("VAEEncode", pixels=[pixels, 0], vae=["loader", 2])


def picture(count=1, side=128):
    return node("EmptyImage", width=side, height=side, batch_size=count, color=0x806040)


def hires_by_latent():
    larger = node("LatentUpscaleBy", samples=["sampler", 0], upscale_method="bislerp", scale_by=1.5)
    second = sampler(["larger", 0], steps=2, denoise=0.5)
    return {"larger": larger, "second": second, "decode": decoded("second")}


def hires_by_model():
    return {
        "first": decoded(),
        "upscaler": node("UpscaleModelLoader", model_name="twice.pth"),
        "larger": node("ImageUpscaleWithModel", upscale_model=["upscaler", 0], image=["first", 0]),
        "encoded": encoded("larger"),
        "second": sampler(["encoded", 0], denoise=0.5, steps=2),
        "decode": decoded("second"),
    }


def inpainting():
    return {
        "picture": picture(),
        "encoded": encoded(),
        "mask": node("SolidMask", value=1.0, width=64, height=128),
        "masked": node("SetLatentNoiseMask", samples=["encoded", 0], mask=["mask", 0]),
        "sampler": sampler(["masked", 0], denoise=0.8),
    }


def batch_that_splits_and_joins():
    parts = {
        f"part{index}": node("LatentFromBatch", samples=["sampler", 0], batch_index=index, length=1)
        for index in (0, 1)
    }
    return {
        "picture": picture(count=2),
        "encoded": encoded(),
        "sampler": sampler(["encoded", 0], denoise=0.6),
        **parts,
        "second": sampler(["part1", 0], denoise=0.5, steps=3),
        "joined": node("LatentBatch", samples1=["part0", 0], samples2=["second", 0]),
        "decode": decoded("joined"),
    }


def control_that_ends():
    controlled = node(
        "ControlNetApplyAdvanced",
        **{"positive": ["positive", 0], "negative": ["negative", 0], "image": ["picture", 0]},
        **{"control_net": ["control", 0], "strength": 1.0, "start_percent": 0.0},
        end_percent=0.4,
    )
    again = sampler(["latent", 0], steps=3)
    again["inputs"] |= {"positive": ["controlled", 0], "negative": ["controlled", 1]}
    control = node("ControlNetLoader", control_net_name="control.pth")
    return {"picture": picture(), "control": control, "controlled": controlled, "sampler": again}


def lora_chain():
    def lora(model, name):
        inputs = {"lora_name": f"{name}.pt", "strength_model": 0.7}
        return node("LoraLoaderModelOnly", model=[model, 0], **inputs)

    again = sampler(["latent", 0], ["two", 0])
    return {"one": lora("loader", "one"), "two": lora("one", "two"), "sampler": again}


def tiles():
    """One node that samples several times, as a node that upscales by tiles does."""
    return {
        "picture": picture(count=3),
        "encoded": encoded(),
        "tiles": node("RebatchLatents", latents=["encoded", 0], batch_size=1),
        "sampler": sampler(["tiles", 0], denoise=0.5, steps=2),
        "whole": node("RebatchLatents", latents=["sampler", 0], batch_size=3),
        "decode": decoded("whole"),
    }


def base_and_refiner():
    def half(model, latent, noise, start, end):
        links = {"model": [model, 0], "latent_image": [latent, 0]}
        links |= {"positive": ["positive", 0], "negative": ["negative", 0]}
        run = {"noise_seed": 4, "steps": 3, "cfg": 1.0, "sampler_name": "euler"}
        span = {"start_at_step": start, "end_at_step": end, "scheduler": "normal"}
        ends = {"add_noise": noise, "return_with_leftover_noise": "enable"}
        return node("KSamplerAdvanced", **links, **run, **span, **ends)

    return {
        "loader": node("CheckpointLoaderSimple", ckpt_name="sdxl.ckpt"),
        "refiner": node("CheckpointLoaderSimple", ckpt_name="sdxl.ckpt"),
        "latent": node("EmptyLatentImage", width=256, height=256, batch_size=1),
        "sampler": half("loader", "latent", "enable", 0, 2),
        "second": half("refiner", "sampler", "disable", 2, 3),
        "decode": decoded("second"),
    }


def sampler_that_lies():
    """Like Detail Daemon."""
    graph = turbo()
    graph["euler"] = node("KSamplerSelect", sampler_name="euler")
    graph["lying"] = node("LyingSampler", sampler=["euler", 0])
    graph["sampler"]["inputs"]["sampler"] = ["lying", 0]
    inputs = {"model": ["loader", 0], "scheduler": "karras", "steps": 3, "denoise": 1.0}
    return graph | {"sigmas": node("BasicScheduler", **inputs)}


def turbo():
    links = {"model": ["loader", 0], "latent_image": ["latent", 0], "sigmas": ["sigmas", 0]}
    links |= {"positive": ["positive", 0], "negative": ["negative", 0], "sampler": ["euler", 0]}
    return {
        "sigmas": node("SDTurboScheduler", model=["loader", 0], steps=1, denoise=1.0),
        "euler": node("KSamplerSelect", sampler_name="euler_ancestral"),
        "sampler": node("SamplerCustom", **links, add_noise=True, noise_seed=5, cfg=1.0),
    }


ANY_SIZE = {"preset": "custom", "strategy": "window", "min_tokens": 1}
"""Settings that merge pictures as small as these."""

GRAPHS = [
    *(hires_by_latent, hires_by_model, inpainting, batch_that_splits_and_joins, control_that_ends),
    *(lora_chain, tiles, base_and_refiner, turbo, sampler_that_lies),
]


def patched(graph, place, **inputs):
    """A graph with our node right behind the loaders, or right before the samplers."""
    result = copy.deepcopy(graph)
    sources = {name: node["inputs"].get("model", [None])[0] for name, node in graph.items()}
    for name, source in sources.items():
        is_sampler = "latent_image" in graph[name]["inputs"]
        if is_sampler if place == "last" else source and "ckpt_name" in graph[source]["inputs"]:
            result[f"tome_{source}"] = patch([source, 0], **inputs)
    for name, source in sources.items():
        if f"tome_{source}" in result:
            result[name]["inputs"]["model"] = [f"tome_{source}", 0]
    return result


@pytest.mark.parametrize("graph_of", GRAPHS)
def test_the_node_works_in_each_place_of_graphs_that_people_share(server, files, graph_of):
    first = sampler(["latent", 0])
    graph = txt2img(nodes={"sampler": first}, side=128) | graph_of()
    samplers = [name for name, node in graph.items() if "latent_image" in node["inputs"]]
    plain = saved_pixels(server, server.run(graph))
    # Elsewhere there is nothing between the loader and the sampler.
    for place in ("first", "last") if graph_of is lora_chain else ("last",):
        read = len(server.log)
        with_ours = patched(graph, place, seed=len(place), **ANY_SIZE)
        merged = saved_pixels(server, server.run(with_ours))
        assert merged != plain and len(merged) == len(plain)
        lines = re.findall(r"\[ToMe\] (.*)", server.log[read:])
        count = "3 runs: " if graph_of is tiles else ""
        told = [re.match(rf".* \(node (\w+)\): {count}merged ", line)[1] for line in lines]
        assert sorted(told) == sorted(samplers)


def trained(checkpointing, **inputs):
    graph = txt2img(
        side=128, nodes={"tome": patch(**inputs), "picture": picture(), "encoded": encoded()}
    )
    train = node(
        "TrainLoraNode",
        **{"model": ["tome", 0], "latents": ["encoded", 0], "positive": ["positive", 0]},
        **{"batch_size": 1, "grad_accumulation_steps": 1, "steps": 1, "learning_rate": 5e-4},
        **{"rank": 2, "optimizer": "SGD", "loss_function": "MSE", "seed": 0},
        **{"training_dtype": "fp32", "lora_dtype": "fp32", "quantized_backward": False},
        **{"algorithm": "LoRA", "gradient_checkpointing": checkpointing, "checkpoint_depth": 1},
        **{"offloading": False, "existing_lora": "[None]", "bucket_mode": False},
        bypass_mode=False,
    )
    kept = {name: graph[name] for name in ("loader", "positive", "tome", "picture", "encoded")}
    return kept | {"train": train, "shown": node("PreviewAny", source=["train", 1])}


def test_a_patched_model_is_trained_and_unmerged_where_gradients_need_it_to_run_again(server):
    def losses(**inputs):
        read = len(server.log)
        entry = server.run(trained(**inputs))
        return entry["outputs"]["shown"]["text"], server.log[read:]

    plain, log = losses(checkpointing=True, ratio=0.0)
    assert f"ToMePatchModel (node tome): {reasons.OFF}" in log
    loss, log = losses(checkpointing=True, scope="stack", **ANY_SIZE)
    assert loss == plain and f"nothing merged: {reasons.RECOMPUTED}" in log
    loss, log = losses(checkpointing=False, scope="stack", **ANY_SIZE)
    assert loss != plain and "TrainLoraNode (node train): merged 4/4 blocks" in log
