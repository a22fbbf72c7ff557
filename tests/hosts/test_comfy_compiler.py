"""ComfyUI's compiler stays out of runs that merge tokens.

It needs CUDA and a ComfyUI of 0.34 or later. A double stands for it, written from what is known of
`comfy.model_prefetch` and of `comfy_aimdo.malloc_graph` 0.6.0 (2026-11): the first pass over a
scope records the sizes that are allocated in it; in later passes they have to be the same, and what
was allocated in a block has to be free when the block ends.
"""

import threading
import weakref
from contextlib import nullcontext

import comfy.model_management
import pytest
import torch
from comfy.cli_args import args
from common import relative_error
from host import OVERRIDE, keys_only
from models.comfyui import Tiny, sample
from models.made_up import Block, MadeUp, build
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tome_nodes.comfyui import comfy_compiler
from tome_nodes.comfyui.attachment import attach

FAILED = "aimdo memory compile error"
TINY = Tiny("made up", {}, 3)

# ComfyUI 0.18.2 has no such module.
model_prefetch = pytest.importorskip("comfy.model_prefetch")


class InPlaceBlock(Block):
    """A block that changes its tokens in place, so that no memory of it stays."""

    def forward(self, x, mask=None, transformer_options=None):
        x.add_(self.attn(self.norm(x), mask=mask, transformer_options=transformer_options))
        return x.add_(self.mlp(self.norm(x)))


class RecordedBeforeWrappers(MadeUp):
    """Has its memory recorded from before other nodes' wrappers, as MiniMax H3 does."""

    def make_blocks(self) -> None:
        self.blocks = nn.ModuleList(InPlaceBlock() for _ in range(3))

    def forward(self, x, timestep, context=None, transformer_options=None, **kwargs):
        model_prefetch.malloc_graph_begin(x.device)
        out = super().forward(x, timestep, context, transformer_options, **kwargs)
        model_prefetch.malloc_graph_end()
        return out

    def run(self, picture, text, sides, options, **kwargs):
        x = torch.cat([text, picture], 1)
        for block in self.blocks:
            model_prefetch.malloc_graph_block()
            x = block(x, transformer_options=options)
        model_prefetch.malloc_graph_block(ends=True)
        return x[:, text.shape[1] :]


class RecordedBlocks(RecordedBeforeWrappers):
    """Has the memory of its blocks recorded, as Qwen-Image 2.1 does."""

    def forward(self, *args, **kwargs):
        return MadeUp.forward(self, *args, **kwargs)

    def run(self, picture, text, sides, options, **kwargs):
        model_prefetch.malloc_graph_begin(picture.device)
        x = super().run(picture, text, sides, options, **kwargs)
        model_prefetch.malloc_graph_end()
        return x


class Compiler(TorchDispatchMode):
    """Records the memory of one thread's models, and replays it."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.recorded = {}
        self.passes = 0
        self._scopes = []

    def enabled(self, device):
        self.asked.append(not args.disable_comfy_compiler)
        return self.asked[-1]

    def begin(self, device):
        if self.enabled(device):
            self._scopes.append(("root", [], {}))
            self.__enter__()

    def block(self, ends=False):
        if not self._scopes:
            return
        if self._scopes[-1][0] == "block":
            self._end()
        if not ends:
            self._scopes.append(("block", [], {}))

    def end(self):
        if self._scopes:
            self.__exit__(None, None, None)
            self._end(may_stay=True)
            self.passes += 1

    def _end(self, may_stay=False):
        name, sizes, made = self._scopes.pop()
        stays = any(each() is not None for each in made.values())
        if self.recorded.setdefault(name, sizes) != sizes or (stays and not may_stay):
            raise RuntimeError(FAILED)

    def abort(self):
        while self._scopes:
            name, *_ = self._scopes.pop()
            if name == "root":
                self.__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, arguments=(), options=None):
        options = options or {}
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((arguments, options))
            if isinstance(each, torch.Tensor)
        }
        result = func(*arguments, **options)
        _, sizes, made = self._scopes[-1]
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.numel() > 1:
                storage = each.untyped_storage()
                if storage.data_ptr() not in given:
                    sizes.append(storage.nbytes())
                    made[id(each)] = weakref.ref(each)
        return result


@pytest.fixture
def compiler(monkeypatch):
    """The double, in place of what the host has on CUDA."""
    double = Compiler()
    monkeypatch.setattr(args, "disable_comfy_compiler", False, raising=False)
    for name, function in {
        "malloc_graph_enabled": double.enabled,
        "malloc_graph_begin": double.begin,
        "malloc_graph_block": double.block,
        "malloc_graph_end": double.end,
    }.items():
        monkeypatch.setattr(model_prefetch, name, function, raising=False)
    yield double
    double.abort()


kinds = pytest.mark.parametrize("kind", [RecordedBeforeWrappers, RecordedBlocks])


@kinds
def test_without_merging_the_compiler_records_and_replays(compiler, kind):
    sample(build(kind), TINY, (16, 20), steps=3)
    assert compiler.asked == [True] * 3
    assert compiler.passes == 3
    assert len(compiler.recorded["block"]) > 3


@kinds
def test_it_would_end_a_run_that_merges(compiler, kind, monkeypatch):
    monkeypatch.setattr(comfy_compiler, "switched_off", lambda options: nullcontext())
    with pytest.raises(RuntimeError, match=FAILED):
        sample(attach(build(kind), keys_only()), TINY, (16, 20), steps=3)


@kinds
def test_it_is_off_while_a_run_merges_and_on_for_others(compiler, kind):
    model = build(kind)
    plain = sample(model, TINY, (16, 20), steps=3)
    compiler.asked.clear()
    merged = sample(attach(model, keys_only(ratio_end=0.25)), TINY, (16, 20), steps=3)
    assert 1e-6 < relative_error(merged, plain) < 0.5
    # Two evaluations ask where the picture is.
    assert compiler.asked == [False] * 5
    assert args.disable_comfy_compiler is False
    compiler.asked.clear()
    assert torch.equal(sample(model, TINY, (16, 20), steps=3), plain)
    assert compiler.asked == [True] * 3


@pytest.mark.parametrize(
    "end", [RuntimeError, KeyboardInterrupt, comfy.model_management.InterruptProcessingException]
)
def test_it_is_on_again_whatever_ends_a_run(compiler, end):
    model = build(RecordedBlocks)

    def fails(*_, **__):
        raise end("no attention today")

    failing = attach(model, keys_only())
    failing.model_options["transformer_options"][OVERRIDE] = fails
    with pytest.raises(end):
        sample(failing, TINY, (16, 20))
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


def test_what_the_user_has_switched_off_stays_off(compiler):
    args.disable_comfy_compiler = True
    with comfy_compiler.switched_off({}):
        pass
    assert args.disable_comfy_compiler is True


def test_a_host_without_the_compiler_is_left_alone(monkeypatch):
    monkeypatch.delattr(args, "disable_comfy_compiler", raising=False)
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
