"""A tomesd script with only its import changed, and the example of docs/python.md."""

import inspect
import logging
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import diffusers
import pytest
import tomesd
import torch
from common import relative_error
from models.pipelines import call, make_unet, sd15

import tome_nodes
from tome_nodes.settings.config import ToMeConfig

pytestmark = pytest.mark.newest_only

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
torch.backends.cudnn.allow_tf32 = False
from diffusers import StableDiffusionPipeline
import {library} as tomesd

sys.path.insert(0, "tests")
from models.pipelines import sd15

pipe = sd15().pipeline
assert isinstance(pipe, StableDiffusionPipeline)

def image(**options):
    return pipe(
        prompt_embeds=torch.linspace(-1, 1, 7 * 32).view(1, 7, 32),
        negative_prompt_embeds=torch.zeros(1, 7, 32),
        height=96,
        width=128,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images

plain = image()
tomesd.apply_patch(pipe, 0.5, use_rand=False)
merged = image()
tomesd.apply_patch(pipe.unet, ratio=0.7, sx=4, sy=4, max_downsample=2, use_rand=False,
                   merge_attn=True, merge_crossattn=True, merge_mlp=True)
more = image()
tomesd.remove_patch(pipe)
assert torch.equal(image(), plain)
torch.save([plain, merged, more], sys.argv[1])
assert "{library}" == "tomesd" or not {{"comfy", "comfy_api", "ldm"}} & set(sys.modules)
"""


def run(code, *arguments):
    # The repository's root must not be importable as a package itself.
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)


def test_the_same_images_as_with_tomesd(tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    run(SCRIPT.format(library="tome_nodes"), ours)
    monkeypatch.setattr(sys, "argv", ["script.py", str(theirs)])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(library="tomesd"), encoding="utf-8")
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(script))
    plain, *images = torch.load(ours)
    for actual, expected in zip([plain, *images], torch.load(theirs), strict=True):
        assert relative_error(actual, expected) < 5e-5
    assert all(relative_error(image, plain) > 1e-3 for image in images)


def test_the_example_of_the_documentation_merges_and_stops_merging(monkeypatch, log_messages):
    case = sd15()

    class Pretrained(diffusers.StableDiffusionPipeline):
        """Small random weights, and no text encoder."""

        @classmethod
        def from_pretrained(cls, name):
            return cls(**case.pipeline.components, requires_safety_checker=False)

        def __call__(self, prompt):
            text = {"prompt_embeds": torch.ones(1, 7, 32), "guidance_scale": 1.0}
            return super().__call__(**text, **case.arguments, num_inference_steps=2)

    monkeypatch.setattr(diffusers, "StableDiffusionPipeline", Pretrained)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    script, _ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(script, names)
    assert names["image"].size == (128, 96)
    merged = ["[ToMe] merged 3/7 blocks (192 -> 96 tokens), ratio 0.50"]
    assert log_messages() == merged
    names["pipe"]("a lighthouse at dusk")
    assert log_messages() == merged


def test_importing_the_package_imports_no_host_and_no_backend():
    heavy = ("comfy", "diffusers", "ldm", "torch", "triton")
    run(f"import sys, tome_nodes; assert not set(sys.modules) & {set(heavy)}")


def test_names_order_and_defaults_are_those_of_tomesd():
    theirs = inspect.signature(tomesd.apply_patch).parameters
    ours = inspect.signature(tome_nodes.apply_patch).parameters
    assert [*ours][: len(theirs)] == [*theirs]
    assert all(ours[name].default == theirs[name].default for name in theirs)
    assert [*ours][len(theirs) :] == ["preset", "options"]
    assert [*inspect.signature(tome_nodes.remove_patch).parameters] == ["model"]


NOT_THE_DEFAULT = {
    "ratio": 0.25,
    "max_downsample": 2,
    "sx": 4,
    "sy": 4,
    "use_rand": False,
    "seed": 7,
    "merge_attn": False,
    "merge_crossattn": True,
    "merge_mlp": True,
    "start_percent": 0.9,
    "end_percent": 0.1,
    "strategy": "pool",
    "scope": "block",
    "attn_tokens": "k,v",
    "ratio_end": 0.1,
    "min_tokens": 1000,
    "proportional_attn": True,
}
"""Values that each change the output of a UNet, half way through the noise levels."""


def test_every_option_has_an_effect_by_keyword():
    # Frames are of video, which no UNet of diffusers makes; steps on all tokens are of stacks; and
    # answers are forecast of transformers only.
    others = {"backend", "st", "refresh_steps", "forecast"}
    assert {*NOT_THE_DEFAULT, *others} == {field.name for field in fields(ToMeConfig)}
    unet = make_unet()
    default = call(tome_nodes.apply_patch(unet))
    for name, value in NOT_THE_DEFAULT.items():
        tome_nodes.apply_patch(unet, **{name: value})
        assert relative_error(call(unet), default) > 1e-4, name


def test_the_backend_is_set_by_keyword(caplog):
    caplog.set_level(logging.INFO, logger="tome_nodes")
    unet = make_unet("one_level")
    for backend in "torch", "triton":
        call(tome_nodes.apply_patch(unet, backend=backend))
    # Where Triton is not available, the log says so.
    assert ["triton" in line.lower() for line in caplog.messages] == [False, True]
