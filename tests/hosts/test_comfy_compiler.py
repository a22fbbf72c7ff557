"""ComfyUI's compiler stays out of runs that merge tokens.

It needs CUDA and a ComfyUI of 0.34 or later. A double, written from what is known of
`comfy.model_prefetch` (2026-11), only notes whether it is on where memory begins to be recorded.
"""

import threading

import comfy.model_management
import pytest
import torch
from comfy.cli_args import args
from common import relative_error
from host import keys_only, with_override
from models.comfyui import TINY, sample

from tome_nodes.comfyui import comfy_compiler
from tome_nodes.comfyui.attachment import attach

FLUX = TINY["flux"]

# ComfyUI 0.18.2 has no such module.
model_prefetch = pytest.importorskip("comfy.model_prefetch")


@pytest.fixture
def compiler(monkeypatch):
    """The double, in place of what the host has on CUDA: whether it was on where a model began."""
    was_on = []
    monkeypatch.setattr(args, "disable_comfy_compiler", False, raising=False)

    def begin(device):
        was_on.append(not args.disable_comfy_compiler)

    monkeypatch.setattr(model_prefetch, "malloc_graph_enabled", lambda device: True, raising=False)
    monkeypatch.setattr(model_prefetch, "malloc_graph_begin", begin, raising=False)
    return was_on


@pytest.fixture
def recorded(models):
    """A model that has its memory recorded while it runs."""
    model = models("flux")
    network = model.model.diffusion_model
    with network.register_forward_pre_hook(lambda *_: model_prefetch.malloc_graph_begin(None)):
        yield model


def test_it_is_off_while_a_run_merges_and_on_for_others(compiler, recorded):
    plain = sample(recorded, FLUX, steps=3)
    compiler.clear()
    merged = sample(attach(recorded, keys_only(ratio_end=0.25)), FLUX, steps=3)
    assert 1e-6 < relative_error(merged, plain) < 0.5
    assert compiler == [False] * 3
    assert args.disable_comfy_compiler is False
    compiler.clear()
    assert torch.equal(sample(recorded, FLUX, steps=3), plain)
    assert compiler == [True] * 3


@pytest.mark.parametrize(
    "end", [RuntimeError, KeyboardInterrupt, comfy.model_management.InterruptProcessingException]
)
def test_it_is_on_again_whatever_ends_a_run(compiler, models, end):
    def fails(*_, **__):
        raise end("no attention today")

    with pytest.raises(end):
        sample(with_override(attach(models("flux"), keys_only()), fails), FLUX)
    assert args.disable_comfy_compiler is False


def test_nested_runs_and_runs_side_by_side_count(compiler):
    inside, outside = {}, {}
    with comfy_compiler.switched_off(outside):
        with comfy_compiler.switched_off(inside):
            assert args.disable_comfy_compiler is True
        assert args.disable_comfy_compiler is True
        entered, leave = threading.Event(), threading.Event()

        def other():
            with comfy_compiler.switched_off({}):
                entered.set()
                leave.wait()

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
    assert args.disable_comfy_compiler is True
    leave.set()
    thread.join()
    assert args.disable_comfy_compiler is False
    assert inside == outside == {"disable_comfy_compiler": True}


def test_what_the_user_has_switched_off_stays_off_and_a_host_without_it_alone(monkeypatch):
    monkeypatch.setattr(args, "disable_comfy_compiler", True, raising=False)
    with comfy_compiler.switched_off({}):
        pass
    assert args.disable_comfy_compiler is True
    monkeypatch.delattr(args, "disable_comfy_compiler")
    with comfy_compiler.switched_off({}):
        assert not hasattr(args, "disable_comfy_compiler")


def test_an_option_of_the_host_comes_first(compiler, monkeypatch):
    def enabled(device, transformer_options):
        return not transformer_options.get("disable_comfy_compiler")

    monkeypatch.setattr(model_prefetch, "malloc_graph_enabled", enabled)
    options = {}
    with comfy_compiler.switched_off(options):
        assert not enabled(None, options)
        assert args.disable_comfy_compiler is False
