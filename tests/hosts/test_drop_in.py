"""A tomesd script with only its import changed, and what docs/python.md says."""

import inspect
import os
import re
import subprocess
import sys

import diffusers
import pytest
import tomesd
import torch
from common import relative_error
from every_option import EVERY_OPTION
from models.pipelines import TRANSFORMERS, call, flux_with_vae, make_unet, sd15

import tome_nodes
from tools.environment import ROOT

pytestmark = pytest.mark.newest_only

SCRIPT = """
case = sd15()
plain = case()
library.apply_patch(case.pipeline, 0.5, use_rand=False)
merged = case()
library.apply_patch(case.network, ratio=0.7, sx=4, sy=4, max_downsample=2, use_rand=False,
                    merge_attn=True, merge_crossattn=True, merge_mlp=True)
more = case()
library.remove_patch(case.pipeline)
assert torch.equal(case(), plain)
"""

ALONE = f"""
import sys
import torch
torch.backends.cudnn.allow_tf32 = False
sys.path.insert(0, "tests")
from models.pipelines import sd15
import tome_nodes as library
{SCRIPT}
torch.save([plain, merged, more], sys.argv[1])
assert not {{"comfy", "comfy_api", "ldm"}} & set(sys.modules)
"""

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def run(code, *arguments):
    # The repository's root must not be importable as a package itself.
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)


def test_the_same_images_as_with_tomesd_and_no_host_or_backend_is_imported(tmp_path):
    heavy = {"comfy", "diffusers", "ldm", "torch", "triton"}
    run(f"import sys, tome_nodes; assert not set(sys.modules) & {heavy}")
    run(ALONE, tmp_path / "ours")
    theirs = {"library": tomesd, "sd15": sd15, "torch": torch}
    exec(SCRIPT, theirs)
    plain, *images = torch.load(tmp_path / "ours")
    for ours, name in zip([plain, *images], ("plain", "merged", "more"), strict=True):
        assert relative_error(ours, theirs[name]) < 5e-5
    assert all(relative_error(image, plain) > 1e-3 for image in images)


@pytest.mark.parametrize(
    ("number", "make", "line"),
    [
        (0, sd15, "[ToMe] merged 3/7 blocks (192 -> 96 tokens), ratio 0.50"),
        (1, flux_with_vae, "[ToMe] forecast 1/4 steps (3)"),
    ],
)
def test_the_examples_of_the_documentation(monkeypatch, log_messages, number, make, line):
    """With small random weights, and without text encoders."""
    case = make()
    kind = type(case.pipeline)

    class Pretrained(kind):
        @classmethod
        def from_pretrained(cls, name):
            return cls(**case.pipeline.components)

        def __call__(self, prompt):
            return super().__call__(**case.arguments, num_inference_steps=4)

    monkeypatch.setattr(diffusers, kind.__name__, Pretrained)
    unpatched = type(case.network)
    scripts = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names = {}
    exec(scripts[number], names)
    assert names["image"].size == (case.arguments["width"], case.arguments["height"])
    assert log_messages() == [line]
    assert type(case.network) is unpatched


def test_the_documentation_names_the_tested_pipelines():
    named = set(re.findall(r"`(\w+Pipeline)`", PAGE))
    assert named == {type(make().pipeline).__name__ for make in TRANSFORMERS.values()}


def test_names_order_and_defaults_are_those_of_tomesd():
    theirs = inspect.signature(tomesd.apply_patch).parameters
    ours = inspect.signature(tome_nodes.apply_patch).parameters
    assert [*ours][: len(theirs)] == [*theirs]
    assert all(ours[name].default == theirs[name].default for name in theirs)
    assert [*ours][len(theirs) :] == ["preset", "options"]
    assert [*inspect.signature(tome_nodes.remove_patch).parameters] == ["model"]


@pytest.mark.parametrize("name", [name for name, case in EVERY_OPTION.items() if case.is_seen])
def test_an_option_has_an_effect_by_keyword(name):
    """Half way through the noise levels, on a map of more than one window."""
    case, unet, grid = EVERY_OPTION[name], make_unet(), (12, 32)
    default = call(tome_nodes.apply_patch(unet), grid=grid)
    # Here the default of proportional_attn is another.
    value = case.default if name == "proportional_attn" else case.other
    tome_nodes.apply_patch(unet, **{name: value})
    assert relative_error(call(unet, grid=grid), default) > 1e-4


def test_the_backend_is_set_by_keyword(caplog):
    caplog.set_level("INFO", logger="tome_nodes")
    unet = make_unet("one_level")
    for backend in "torch", "triton":
        call(tome_nodes.apply_patch(unet, backend=backend))
    # Where Triton is not available, the log says so.
    assert ["triton" in line.lower() for line in caplog.messages] == [False, True]
