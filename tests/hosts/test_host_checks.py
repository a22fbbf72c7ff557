"""A ComfyUI that is not as the pack knows it leaves the model unpatched; doubles of later ones.

The attention of ComfyUI 0.38 is written down as far as it is known; see `CONTRIBUTING.md`.
"""

import copy
import functools
import inspect
from contextlib import ExitStack

import comfy.ldm.flux.math
import comfy.ldm.modules.attention as host_attention
import comfy.samplers
import pytest
import torch
from comfy.ldm.flux.layers import DoubleStreamBlock
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, optimized_attention
from comfy.ldm.wan.model import WanSelfAttention
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import ModelSamplingDiscrete
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from comfy.samplers import CFGGuider
from common import ONLY_KEYS, relative_error
from host import OVERRIDE, fast, keys_only, merging, overridden, shuffle_error, with_override
from host import sample as sample_unet
from models.comfyui import TINY, UNETS, sample
from torch import nn

from tome_nodes.comfyui import host_checks
from tome_nodes.comfyui.attachment import attach, is_attached
from tome_nodes.comfyui.models import family_of


def renamed(function, *names):
    """A function with other names for its parameters, which it takes by position."""

    @functools.wraps(function)
    def other(*args, **kwargs):
        return function(*args, **kwargs)

    del other.__wrapped__
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    other.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return other


def check_unpatched(model, log_messages, part, config=None):
    patched = attach(model, merging() if config is None else config)
    assert not is_attached(patched)
    assert log_messages() == [
        f"[ToMe] the model stays unpatched, as {host_checks.VERSION} has another {part} than "
        "this version of ToMe Nodes knows; a later one may know it"
    ]
    return patched


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "part"),
    [
        (CFGGuider, "predict_noise", "self x sigma", "CFGGuider.predict_noise"),
        (comfy.samplers, "calc_cond_batch", "model x conds", "calc_cond_batch"),
    ],
)
def test_other_parameters_of_what_forecasts_wrap(
    models, log_messages, monkeypatch, owner, name, parameters, part
):
    monkeypatch.setattr(owner, name, renamed(getattr(owner, name), *parameters.split()))
    check_unpatched(models("flux"), log_messages, part, fast())


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
    ("kind", "owner", "part"),
    [
        ("sd15", BaseModel, "BaseModel.apply_model"),
        ("sd15", BaseModel, "BaseModel.get_dtype_inference"),
        ("sd15", ModelSamplingDiscrete, "BaseModel.model_sampling"),
        ("sd15", ModelPatcher, "ModelPatcher"),
        ("sd15", None, "BasicTransformerBlock.ff"),
        ("flux", None, "Flux.patch_size"),
    ],
)
def test_a_part_that_is_gone(models, log_messages, monkeypatch, kind, owner, part):
    model = models(kind)
    if owner is None:
        owner = model.model.diffusion_model
        owner = owner if kind == "flux" else owner.input_blocks[1][1].transformer_blocks[0]
    methods = {"model_sampling": "percent_to_sigma", "": "add_wrapper_with_key"}
    name = part.partition(".")[2]
    monkeypatch.delattr(owner, methods.get(name, name))
    check_unpatched(model, log_messages, part)


def with_one_more(method, given):
    """A method of a later ComfyUI, which takes one argument more; ``given`` are its values."""

    def later(*args, pe=None, **kwargs):
        given.append(pe)
        return method(*args, **kwargs)

    return later


@pytest.mark.parametrize("kind", [BasicTransformerBlock, CrossAttention])
@pytest.mark.parametrize(
    "settings", [{}, ONLY_KEYS, {"scope": "stack"}], ids=["modules", "keys", "stack"]
)
@pytest.mark.parametrize("is_patched", [False, True])
def test_an_argument_that_a_later_block_takes_besides_gets_to_it(
    sd15, monkeypatch, kind, settings, is_patched
):
    model = sd15.clone()
    if is_patched:
        # In the middle only, but then each block is asked whether it is.
        patch = {"attn1": {("middle", 0): lambda n, context, value, extra: n}}
        model.model_options["transformer_options"]["patches_replace"] = patch
    patched = attach(model, merging(**settings))
    expected, given = sample_unet(patched, steps=1), []

    def hook(module, args, kwargs):
        return args, kwargs | {"pe": "there"}

    monkeypatch.setattr(kind, "forward", with_one_more(kind.forward, given))
    with ExitStack() as hooks:
        for module in model.model.diffusion_model.modules():
            if isinstance(module, kind):
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        assert torch.equal(sample_unet(patched, steps=1), expected)
    assert set(given) == {"there"}


def test_an_argument_that_a_later_model_takes_besides_gets_to_it(sd15, monkeypatch):
    patched = attach(sd15, merging())
    expected, given = sample_unet(patched, steps=1), []

    def apply_model(self, x, t, c_concat, c_crossattn, control, transformer_options, later):
        given.append(later)
        return self._apply_model(x, t, c_concat, c_crossattn, control, transformer_options)

    def execute(self, x, t, c_crossattn, transformer_options):
        wrappers = get_all_wrappers(WrappersMP.APPLY_MODEL, transformer_options)
        executor = WrapperExecutor.new_class_executor(
            functools.partial(apply_model, self), self, wrappers
        )
        return executor.execute(x, t, None, c_crossattn, None, transformer_options, "there")

    execute.__signature__ = inspect.signature(BaseModel.apply_model)
    monkeypatch.setattr(BaseModel, "apply_model", execute)
    assert torch.equal(sample_unet(patched, steps=1), expected)
    assert set(given) == {"there"}


class Container:
    """Holds a tensor until somebody takes it, as of ComfyUI 0.38."""

    def __init__(self, tensor):
        self._tensor = tensor

    def take(self):
        tensor, self._tensor = self._tensor, None
        return tensor


def tensor_of(x):
    return x if isinstance(x, torch.Tensor) else x.take()


def attention_of_038(takes_for_overrides):
    """The attention of the host as of 0.38, called with containers, as overrides may be.

    It calls an override; else what is stored with the weights; else its own function.
    """
    function = host_attention.attention_pytorch.__wrapped__

    def attention(q, k, v, heads, mask=None, preferred_attention=None, **kwargs):
        override = (kwargs.get("transformer_options") or {}).get(OVERRIDE)
        kwargs["_inside_attn_wrapper"] = True
        if override is None:
            call = getattr(preferred_attention, "function", None)
            if call is None:
                call, (q, k, v) = function, map(tensor_of, (q, k, v))
            return call(q, k, v, heads, mask=mask, **kwargs)
        q, k, v = map(tensor_of, (q, k, v))
        if not takes_for_overrides:
            q, k, v = map(Container, (q, k, v))
        return override(function, q, k, v, heads, mask=mask, **kwargs)

    return attention


def cross_attention_of_038(self, x, context=None, value=None, mask=None, transformer_options=None):
    """The forward of a UNet's attentions as of 0.38."""
    context = x if context is None else context
    sources = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
    out = host_attention.optimized_attention(
        *map(Container, sources),
        self.heads,
        mask=mask,
        preferred_attention=getattr(self, "comfy_attention", None),
        transformer_options=transformer_options,
    )
    return self.to_out(out)


@pytest.fixture
def host_038(monkeypatch):
    def install(takes_for_overrides):
        attention = attention_of_038(takes_for_overrides)

        def called(q, k, v, *args, **kwargs):
            contained = (Container(tensor_of(x)) for x in (q, k, v))
            return attention(*contained, *args, **kwargs | {"preferred_attention": None})

        for name in ("optimized_attention", "optimized_attention_masked"):
            monkeypatch.setattr(host_attention, name, attention)
        monkeypatch.setattr(comfy.ldm.flux.math, "optimized_attention", called)

    return install


def test_the_attention_of_038_merges_where_overrides_get_tensors(models, log_messages, host_038):
    tiny, model = TINY["flux"], models("flux")
    config = keys_only()
    plain, expected = (sample(run, tiny) for run in (model, attach(model, config)))
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


class StoredAttention(nn.Module):
    """An attention that is stored with weights, as of ComfyUI 0.38, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def function(self, q, k, v, heads, mask=None, **kwargs):
        q, k, v = map(tensor_of, (q, k, v))
        # Not in a trial.
        if "transformer_options" in kwargs:
            self.keys.append(k.shape[-2])
        return optimized_attention(q, k, v, heads, mask=mask, **kwargs)


@pytest.mark.parametrize("kind", ["minimax_h3", "krea2", "wan21"])
def test_an_attention_that_is_stored_with_the_weights_gets_the_merged_keys(
    models, kind, log_messages, monkeypatch
):
    tiny, model = TINY[kind], models(kind)
    expected = sample(attach(model, keys_only()), tiny)
    record = family_of(model.model.diffusion_model)
    stored = StoredAttention()
    for block in model.model.diffusion_model.blocks:
        module = getattr(block, record.attention or "attn")
        monkeypatch.setattr(module, "comfy_attention", stored, raising=False)
    result = sample(attach(model, keys_only()), tiny)
    assert relative_error(result, expected) < 1e-5
    picture = 80 * (tiny.frames or 1)
    assert stored.keys
    assert all(keys < tiny.before + picture for keys in stored.keys)
    assert "weigh as one token" not in log_messages()[-1]


@pytest.mark.parametrize("are_all_stored", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, ONLY_KEYS, {"scope": "stack"}], ids=["modules", "keys", "stack"]
)
def test_an_attention_that_is_stored_with_a_unet_is_called_as_often_as_without_us(
    models, host_038, settings, are_all_stored, log_messages, monkeypatch
):
    """Also if another one, or none, is stored with other attentions of a stack."""
    model, size = models("sdxl"), (24, 32)
    host_038(takes_for_overrides=True)
    monkeypatch.setattr(CrossAttention, "forward", cross_attention_of_038)
    patched = attach(model, merging(strategy="window", max_downsample=4, **settings))

    def run(model):
        return sample(model, UNETS["sdxl"], size, steps=2)

    expected = run(patched)
    stored = StoredAttention()
    for name, module in model.model.diffusion_model.named_modules():
        if isinstance(module, CrossAttention) and (are_all_stored or ".0.attn1" in name):
            monkeypatch.setattr(module, "comfy_attention", stored, raising=False)
    run(model)
    without, stored.keys = stored.keys, []
    assert without
    assert relative_error(run(patched), expected) < 1e-5
    assert len(stored.keys) == len(without) and sum(stored.keys) < sum(without)
    assert "weigh as one token" not in log_messages()[-1]


def test_a_control_of_minimax_h3_sees_all_tokens(models, log_messages):
    """As MiniMaxH3FunControl, it runs a block of its own on the rows of the model's first one."""
    tiny, model = TINY["minimax_h3"], models("minimax_h3")
    control = copy.deepcopy(model.model.diffusion_model.blocks[0])
    rows = []

    def controlled(args, extra):
        options = dict(args["transformer_options"])
        options.pop(OVERRIDE, None)
        given = args["t_emb"], args["mod_segments"], args["rope_freqs"]
        hint = control(args["img"].clone(), *given, transformer_options=options)
        rows.append(len(hint))
        return {"img": extra["original_block"](args)["img"] + 0.5 * hint}

    other = model.clone()
    other.set_model_patch_replace(controlled, "dit", "double_block", 0)
    plain, changed = (sample(run, tiny, steps=4) for run in (model, other))
    assert relative_error(changed, plain) > 1e-3
    assert shuffle_error(other, tiny, steps=4) < 1e-5
    assert set(rows) == {tiny.before + 80 * tiny.frames}
    assert "merged 2/2 blocks" in log_messages()[-1]


@pytest.mark.parametrize("hook", ["override", "patch"])
def test_beside_a_sparse_attention_nothing_merges_and_the_log_says_why(models, log_messages, hook):
    tiny, model = TINY["minimax_h3"], models("minimax_h3")

    def override(func, *args, **kwargs):
        return func(*args, **kwargs)

    def patch(args, extra):
        return extra["original_block"](args)

    override.__module__ = patch.__module__ = "comfy_extras.nodes_sparse_attention"
    sparse = with_override(model, override) if hook == "override" else model.clone()
    if hook == "patch":
        sparse.set_model_patch_replace(patch, "dit", "double_block", 0)
    plain = sample(sparse, tiny)
    assert torch.equal(sample(attach(sparse, keys_only()), tiny), plain)
    assert "nothing merged: Model Sparse Attention needs all keys" in log_messages()[-1]
