"""On a ComfyUI that is not as the pack knows it, the model stays unpatched and the workflow runs.

Each part is broken in turn. The attention of ComfyUI 0.38 is written down here as far as it is
known, since no such version can be installed.
"""

import functools
import inspect

import comfy.ldm.flux.math
import comfy.ldm.modules.attention as host_attention
import pytest
import torch
from comfy.ldm.flux.layers import DoubleStreamBlock
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention
from comfy.ldm.wan.model import WanSelfAttention
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import ModelSamplingDiscrete
from comfy.samplers import CFGGuider
from common import relative_error
from host import OVERRIDE, keys_only, merging, overridden
from models.comfyui import TINY, sample

from tome_nodes.comfyui import host_checks
from tome_nodes.comfyui.attachment import attach, is_attached


def renamed(function, *names):
    """A function with other names for its parameters, which it takes by position."""

    @functools.wraps(function)
    def other(*args, **kwargs):
        return function(*args, **kwargs)

    del other.__wrapped__
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    other.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return other


def check_unpatched(model, log_messages, part):
    patched = attach(model, merging())
    assert not is_attached(patched)
    assert log_messages() == [
        f"[ToMe] the model stays unpatched, as {host_checks.version()} has another {part} than "
        "this version of ToMe Nodes knows; a later one may know it"
    ]
    return patched


@pytest.mark.parametrize(
    ("kind", "owner", "name", "parameters", "part"),
    [
        ("sd15", BaseModel, "apply_model", "self x sigma", "BaseModel.apply_model"),
        ("sd15", CFGGuider, "outer_sample", "self latent noise", "CFGGuider.outer_sample"),
        ("sd15", BasicTransformerBlock, "forward", "self x text", "BasicTransformerBlock.forward"),
        ("sd15", CrossAttention, "forward", "self x", "BasicTransformerBlock.attn1.forward"),
        ("flux", DoubleStreamBlock, "forward", "self img txt", "DoubleStreamBlock.forward"),
        ("wan21", WanSelfAttention, "forward", "self x freqs", "WanSelfAttention.forward"),
    ],
)
def test_other_parameters(models, log_messages, monkeypatch, kind, owner, name, parameters, part):
    monkeypatch.setattr(owner, name, renamed(getattr(owner, name), *parameters.split()))
    check_unpatched(models(kind), log_messages, part)


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        (BaseModel, "apply_model", "BaseModel.apply_model"),
        (BaseModel, "get_dtype_inference", "BaseModel.get_dtype_inference"),
        (ModelSamplingDiscrete, "percent_to_sigma", "BaseModel.model_sampling"),
        (ModelPatcher, "add_wrapper_with_key", "ModelPatcher"),
    ],
)
def test_a_method_that_is_gone(sd15, log_messages, monkeypatch, owner, name, part):
    monkeypatch.delattr(owner, name)
    check_unpatched(sd15, log_messages, part)


def test_a_module_of_a_block_that_is_named_otherwise(sd15, log_messages, monkeypatch):
    monkeypatch.delattr(sd15.model.diffusion_model.input_blocks[1][1].transformer_blocks[0], "ff")
    check_unpatched(sd15, log_messages, "BasicTransformerBlock.ff")


def test_a_size_of_patches_that_is_named_otherwise(models, log_messages, monkeypatch):
    model = models("flux")
    monkeypatch.delattr(model.model.diffusion_model, "patch_size")
    check_unpatched(model, log_messages, "Flux.patch_size")


class Container:
    """Holds a tensor until somebody takes it, as of ComfyUI 0.38."""

    def __init__(self, tensor):
        self._tensor = tensor

    def take(self):
        tensor, self._tensor = self._tensor, None
        return tensor


def tensor_of(x):
    return x.take() if isinstance(x, Container) else x


def attention_of_038(takes_for_overrides):
    """The attention of the host as of 0.38, which is called with containers.

    An override gets no ``preferred_attention``, and tensors unless it says that it takes
    containers. Whether it is the host that takes them is not settled.
    """
    function = host_attention.attention_pytorch.__wrapped__

    def attention(q, k, v, heads, mask=None, preferred_attention=None, **kwargs):
        override = (kwargs.get("transformer_options") or {}).get(OVERRIDE)
        q, k, v = map(tensor_of, (q, k, v))
        if override is None:
            return function(q, k, v, heads, mask=mask, **kwargs)
        if not takes_for_overrides:
            q, k, v = map(Container, (q, k, v))
        return override(function, q, k, v, heads, mask=mask, **kwargs)

    return attention


@pytest.fixture
def host_038(monkeypatch):
    """Have the host's Flux call attention as 0.38 does."""

    def install(takes_for_overrides):
        attention = attention_of_038(takes_for_overrides)

        def called(q, k, v, *args, **kwargs):
            contained = map(Container, (q, k, v))
            return attention(*contained, *args, preferred_attention="any", **kwargs)

        monkeypatch.setattr(host_attention, "optimized_attention", attention)
        monkeypatch.setattr(comfy.ldm.flux.math, "optimized_attention", called)

    return install


def test_the_attention_of_038_merges_where_overrides_get_tensors(models, log_messages, host_038):
    tiny, model = TINY["flux"], models("flux")
    config = keys_only()
    plain, expected = (sample(each, tiny) for each in (model, attach(model, config)))
    host_038(takes_for_overrides=True)
    assert relative_error(sample(model, tiny), plain) < 1e-5
    assert relative_error(sample(attach(model, config), tiny), expected) < 1e-5
    assert log_messages()[-1].startswith("[ToMe] merged ")
    assert overridden(model) == []


def test_the_attention_of_038_is_left_alone_where_overrides_get_containers(
    models, log_messages, host_038
):
    tiny, model = TINY["flux"], models("flux")
    host_038(takes_for_overrides=False)
    expected = sample(model, tiny)
    patched = check_unpatched(model, log_messages, "optimized_attention")
    assert torch.equal(sample(patched, tiny), expected)
