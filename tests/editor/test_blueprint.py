"""The blueprint of LTX-2, whose real models are too large, run node by node on a small one."""

import json
from types import SimpleNamespace

import comfy.ops
import torch
from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler
from comfy.model_patcher import CoreModelPatcher
from comfy.nested_tensor import NestedTensor
from comfy_extras import nodes_custom_sampler, nodes_lt, nodes_lt_upsampler
from models.comfyui import TINY, build, conditioning

from tome_nodes import reasons
from tome_nodes.comfyui import nodes
from tome_nodes.comfyui.node_texts import PATCH
from tome_nodes.settings.presets import CUSTOM, FREE
from tools.editor import BLUEPRINTS

TINY_LTX = TINY["ltxav"]
WIDGETS = {
    "ToMePatchModel": [option.name for option in PATCH.options],
    "RandomNoise": ["noise_seed"],
    "KSamplerSelect": ["sampler_name"],
    "CFGGuider": ["cfg"],
    "ManualSigmas": ["sigmas"],
}
MODULES = (nodes, nodes_custom_sampler, nodes_lt, nodes_lt_upsampler)


def run(blueprint, inputs, wanted):
    """The inputs of the node of the class ``wanted``, from running the nodes before it."""
    (subgraph,) = blueprint["definitions"]["subgraphs"]
    links = {link["id"]: (link["origin_id"], link["origin_slot"]) for link in subgraph["links"]}
    by_id = {node["id"]: node for node in subgraph["nodes"]}
    values = {(-10, slot): inputs[each["name"]] for slot, each in enumerate(subgraph["inputs"])}

    def arguments_of(node):
        # After a seed, the editor keeps how it changes after a run.
        names = WIDGETS.get(node["type"], ())
        arguments = dict(zip(names, node.get("widgets_values", ()), strict=False))
        if arguments.get("preset", CUSTOM) != CUSTOM:
            # The editor leaves out what would not count.
            arguments = {name: arguments[name] for name in ("preset", *FREE)}
        linked = {slot["name"]: links[slot["link"]] for slot in node["inputs"] if slot["link"]}
        return arguments | {name: value_of(*origin) for name, origin in linked.items()}

    def value_of(number, slot):
        if (number, slot) not in values:
            node = by_id[number]
            (call,) = {getattr(each, node["type"], None) for each in MODULES} - {None}
            results = call.execute(**arguments_of(node)).result
            values.update({(number, index): value for index, value in enumerate(results)})
        return values[number, slot]

    (node,) = (node for node in subgraph["nodes"] if node["type"] == wanted)
    return arguments_of(node)


def test_both_passes_of_ltx_2_run_and_say_why_nothing_is_forecast(log_messages):
    """The noise levels of the first fall little in half of its steps, and far in the others."""
    blueprint = json.loads((BLUEPRINTS / "ToMe LTX-2 two passes.json").read_text(encoding="utf-8"))
    upsampler = LatentUpsampler.from_config(
        {"in_channels": 128, "mid_channels": 32, "num_blocks_per_stage": 1, "dims": 3},
        operations=comfy.ops.disable_weight_init,
    )
    for parameter in upsampler.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    cpu = torch.device("cpu")
    same = SimpleNamespace(normalize=lambda x: x, un_normalize=lambda x: x)
    sound = torch.zeros(1, *TINY_LTX.sound)
    inputs = {
        "model": build(TINY_LTX),
        "positive": conditioning(TINY_LTX, 5),
        "negative": conditioning(TINY_LTX, 6),
        "latent": {"samples": NestedTensor((torch.zeros(1, 128, 4, 8, 8), sound))},
        "upscale_model": CoreModelPatcher(upsampler, load_device=cpu, offload_device=cpu),
        "vae": SimpleNamespace(first_stage_model=SimpleNamespace(per_channel_statistics=same)),
        "ratio": 0.6,
        "seed": 1,
    }
    with torch.inference_mode():
        video = run(blueprint, inputs, "VAEDecodeTiled")["samples"]["samples"]
    assert video.shape == (1, 128, 4, 16, 16)
    assert video.isfinite().all()
    first, second = (line for line in log_messages() if line.startswith("[ToMe]"))
    assert first == f"[ToMe] nothing was forecast: {reasons.UNEVEN}"
    assert reasons.too_short(3, 4) in second
