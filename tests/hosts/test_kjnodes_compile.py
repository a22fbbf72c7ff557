"""Beside TorchCompileModelAdvanced of ComfyUI-KJNodes, which compiles in its own way.

It compiles the blocks of a transformer, or the whole of a model without blocks that it knows, and
drops every guard on the transformer options. What it has compiled belongs to the host's model, so
all clones share it.
"""

from weakref import WeakKeyDictionary

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy.utils import get_attr, set_attr
from common import relative_error
from host import keys_only, preset
from models.comfyui import TINY, UNETS, sample
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.policy import PLAIN

_LAYERS = ("double_blocks", "single_blocks", "layers", "transformer_blocks", "blocks")


class Graphs(CompileCounter):
    """The backend: counts graphs, and runs them without compiling them further."""

    def __call__(self, graph, inputs, options=None):
        return super().__call__(graph, inputs)


class Compiled:
    """A stand-in for the node: the compiled modules by the model that owns them."""

    def __init__(self, backend):
        self._backend = backend
        self._modules = WeakKeyDictionary()

    def patch(self, model):
        clone = model.clone()
        network = clone.get_model_object("diffusion_model")
        layers = [(name, getattr(network, name, ())) for name in _LAYERS]
        blocks = [f"diffusion_model.{name}.{i}" for name, each in layers for i in range(len(each))]
        self._modules[clone.model] = {
            name: torch.compile(
                clone.get_model_object(name),
                backend=self._backend,
                dynamic=False,
                options={"guard_filter_fn": _without_options},
            )
            for name in blocks or ["diffusion_model"]
        }
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "torch.compile", self._evaluate)
        return clone

    def _evaluate(self, executor, *args, **kwargs):
        model = executor.class_obj
        compiled = self._modules[model]
        plain = {name: get_attr(model, name) for name in compiled}
        try:
            for name, module in compiled.items():
                set_attr(model, name, module)
            return executor(*args, **kwargs)
        finally:
            for name, module in plain.items():
                set_attr(model, name, module)


def _without_options(guards):
    return ["transformer_options" not in guard.name for guard in guards]


@pytest.mark.newest_only
@pytest.mark.parametrize(
    ("kind", "config", "steps", "plain_graphs", "own_graphs"),
    [
        # Whole stacks merge at the only level, too.
        ("sd15", preset("fast", policy=PLAIN), 3, 1, 1),
        # A graph for each class of blocks.
        ("flux", preset("balanced"), 8, 2, 0),
        # A graph for each block that merges.
        ("flux", keys_only(), 3, 2, 4),
    ],
    ids=["sd15 fast", "flux balanced", "flux keys"],
)
def test_a_model_and_its_clones_keep_their_whole_graphs(
    shallow, models, fresh_compiler, kind, config, steps, plain_graphs, own_graphs
):
    model, tiny = (shallow, UNETS[kind]) if kind == "sd15" else (models(kind), TINY[kind])
    size = (12, 16) if kind == "sd15" else None

    def run(model):
        return sample(model, tiny, size, steps=steps)

    expected_plain, expected = run(model), run(attach(model, config))
    counters.clear()
    graphs = Graphs()
    node = Compiled(graphs)
    plain = node.patch(model)
    assert relative_error(run(plain), expected_plain) < 1e-5
    assert graphs.frame_count == plain_graphs
    patched = attach(plain, config)
    for each, wanted in (patched, expected), (plain, expected_plain), (patched, expected):
        assert relative_error(run(each), wanted) < 1e-5
        assert graphs.frame_count == plain_graphs + own_graphs
    # The other order of the nodes.
    assert relative_error(run(node.patch(attach(model, config))), expected) < 1e-5
    assert graphs.frame_count == plain_graphs + own_graphs
    assert not counters["graph_break"]
