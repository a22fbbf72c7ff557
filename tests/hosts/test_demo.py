"""What the demo says of a run on the real server."""

import re
from io import BytesIO

import comfy.sample
import numpy as np
import pytest
import torch
from PIL import Image
from test_server import patch, txt2img

from benchmarks.fidelity import sticker_unet
from tools.comparison import compare
from tools.demo import DEFAULT_WORKFLOW, PROMPT
from tools.workflow import load_graph, painted, with_scale, with_steps

MERGING = {"preset": "custom", "max_downsample": "4", "min_tokens": 1, "ratio": 0.5}


def merging_graph():
    graph = txt2img(["tome", 0], {"tome": patch(**MERGING)}, steps=1, side=320)
    graph["loader"]["inputs"]["ckpt_name"] = "sdxl.ckpt"
    return graph


def skipping_graph():
    return txt2img(["tome", 0], {"tome": patch(preset="balanced", ratio=0.6)}, steps=20, side=64)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (merging_graph(), r"\[ToMe\] .*merged 17/17 blocks \(400 -> 200 .*x5, 100 -> 50 .*x12\).*"),
        (skipping_graph(), r"\[ToMe\] .*shallow 8/20 steps.*"),
        (txt2img(steps=1, side=64), "without ToMe, the same off and on"),
    ],
    ids=["merging", "skipping", "plain"],
)
def test_off_and_on_are_timed_and_the_log_of_on_is_shown(server, graph, said):
    comparison = compare(server, graph)
    (line,) = comparison.said()
    assert re.fullmatch(f"KSampler sampler: {said}", line)
    head, _, one, whole = comparison.table().splitlines()
    assert head.split("|")[2].strip() == "off"
    assert "KSampler sampler" in one and "whole run" in whole
    assert comparison.off.image is not None and comparison.on.image is not None


def test_the_demo_paints_what_the_trained_unet_does(server):
    steps, seed, guidance, side = 3, 5, 4.0, 128
    graph = txt2img(steps=steps, seed=seed, side=side)
    graph["sampler"]["inputs"]["cfg"] = guidance
    history = server.run(painted(graph, "Green clouds with a mushroom!"))
    (image,) = server.images(history)

    empty = torch.zeros(1, 8, side // 8, side // 8)
    prompt = sticker_unet.prompt(sticker_unet.KINDS.index("🍄"), 2)[None]
    expected = comfy.sample.sample(
        sticker_unet.load(),
        comfy.sample.prepare_noise(empty, seed),
        *(steps, guidance, "euler", "normal"),
        [[prompt, {}]],
        [[torch.zeros_like(prompt), {}]],
        empty,
        seed=seed,
        disable_pbar=True,
    )
    pixels = np.asarray(Image.open(BytesIO(image)).convert("RGB"), float)
    wanted = sticker_unet.decode(expected)[0].movedim(0, -1).numpy() * 255
    assert np.abs(pixels - wanted).max() < 2


def test_the_demo_puts_off_and_on_side_by_side(server, capsys):
    graph = painted(load_graph(DEFAULT_WORKFLOW), PROMPT)
    comparison = compare(server, with_steps(with_scale(graph, 0.25), 3))
    shown = capsys.readouterr().out
    assert shown.count("base pass ... done") == shown.count("hires pass ... done") == 2
    sheet = comparison.pictures()
    off, on = (Image.open(BytesIO(run.image)) for run in (comparison.off, comparison.on))
    assert off.size == on.size == (128, 128)
    assert sheet.width > 2 * 128 and sheet.height > 128


def test_a_run_without_pictures_has_nothing_to_put_side_by_side(server):
    graph = txt2img(["tome", 0], {"tome": patch(**MERGING)}, side=64)
    graph["save"] = graph["save"] | {
        "class_type": "PreviewImage",
        "inputs": {"images": ["decode", 0]},
    }
    assert compare(server, graph).pictures() is None
