"""Models that merge with the Triton kernels: on a GPU if there is one, else interpreted."""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", "3.6", reason="the kernels need Triton 3.6")

from common import DEVICE, Broken, relative_error
from host import compiled, keys_only, merging, preset, sample
from models import comfyui
from torch._dynamo.testing import CompileCounter

from benchmarks.speed.measure import Operators
from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.models.unet import weigh_keys
from tome_nodes.merging.key_weights import Capabilities, KeyWeights, Ways
from tome_nodes.ops import triton as kernels
from tome_nodes.ops.triton import launching
from tome_nodes.ops.triton import merging as merging_kernels
from tome_nodes.ops.triton.merging import merge_kernel
from tome_nodes.settings.presets import PRESETS

pytestmark = pytest.mark.newest_only


@contextmanager
def launches():
    """Count launches, while no kernel is remembered, and the operators that launch."""
    kind, counter = type(merge_kernel), Operators()
    own = kind.__getitem__

    def launcher(kernel, grid):
        def launch(*arguments, **options):
            before = counter.count
            compiled = own(kernel, grid)(*arguments, **options)
            # What an interpreted kernel does on the host is not counted.
            counter.count = before + 1
            return compiled

        return launch

    with pytest.MonkeyPatch.context() as patch, counter:
        patch.setattr(kind, "__getitem__", launcher)
        patch.setattr(launching, "_REMEMBERS", False)
        yield counter


def sample_small(model, steps):
    return comfyui.sample(model, comfyui.UNETS["sd15"], (4, 8), steps=steps)


@pytest.mark.parametrize("scope", ["module", "stack"])
@pytest.mark.parametrize("strategy", ["bipartite", "window"])
def test_a_model_computes_the_same_with_kernels(sd15, log_messages, strategy, scope):
    options = {"strategy": strategy, "scope": scope, "merge_mlp": True}
    small = {"size": (4, 10), "steps": 1}
    expected = sample(attach(sd15, merging(backend="torch", **options)), **small)
    actual = sample(attach(sd15, merging(backend="triton", **options)), **small)
    assert relative_error(actual, expected) < 1e-5
    assert log_messages()[-1].endswith(", triton") and "triton" not in log_messages()[-2]


def test_weighed_attention_launches_two_more_kernels():
    from comfy.ldm.modules.attention import attention_flash

    q, k, v = (torch.randn(1, tokens, 80, device=DEVICE) for tokens in (16, 8, 8))
    sizes = torch.zeros(1, 8, device=DEVICE)
    ways = Ways(q.device, q.dtype, Capabilities())
    ways.prepare([attention_flash.__wrapped__])
    weights = KeyWeights(sizes, kernels.TRITON, ways, lambda _: None)
    counts = []
    for more in ({}, weigh_keys({}, weights)):
        with launches() as counter:
            attention_flash(q, k, v, 2, **more)
        counts.append(counter.count)
    assert counts[1] - counts[0] == len(["widen", "copy of the channels that count"])


@pytest.mark.parametrize("name", PRESETS)
def test_torch_compile_keeps_one_graph_with_kernels(shallow, fresh_compiler, name):
    config = preset(name, backend="triton")
    expected = sample_small(attach(shallow, config), 2)
    graphs = CompileCounter()
    model = compiled(attach(shallow, config), backend=graphs)
    assert relative_error(sample_small(model, 2), expected) < 1e-5
    assert graphs.frame_count == 1


def test_torch_compile_keeps_one_graph_of_a_transformer_with_kernels(models, fresh_compiler):
    def sample_flux(model):
        return comfyui.sample(model, comfyui.TINY["flux"], (4, 8))

    config, graphs = keys_only(backend="triton"), CompileCounter()
    expected = sample_flux(attach(models("flux"), config))
    model = compiled(attach(models("flux"), config), backend=graphs)
    assert relative_error(sample_flux(model), expected) < 1e-5
    assert graphs.frame_count == 1


def test_a_kernel_that_fails_gives_way_to_torch_before_the_run(
    sd15, log_messages, monkeypatch, untried
):
    broken = Broken("Failed to find C compiler\nand more")
    monkeypatch.setattr(merging_kernels, "merge_kernel", broken)
    small = {"size": (4, 8), "steps": 1}
    plain = sample(attach(sd15, merging(backend="torch")), **small)
    assert torch.equal(sample(attach(sd15, merging(backend="triton")), **small), plain)
    assert log_messages()[-1].endswith(
        ", torch as Triton cannot be used (RuntimeError: Failed to find C compiler)"
    )
