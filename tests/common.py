"""What the tests of all hosts share."""

import math
import os
import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tomesd
import torch
from hypothesis import strategies as st

import tome_nodes
from benchmarks.lossless import lossless
from tome_nodes.python.patch import _networks_of
from tome_nodes.python.patched_model import NetworkPatch
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.policy import Policy
from tome_nodes.skipping.plan import whole_evaluations
from tome_nodes.strategies.bipartite import BipartiteStrategy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BACKEND = "triton" if DEVICE.type == "cuda" else "torch"

ALL_MODULES = {"merge_attn": True, "merge_crossattn": True, "merge_mlp": True}
EVERYTHING = {"max_downsample": 8, "min_tokens": 1, **ALL_MODULES}
"""Options under which every module of every block merges."""

TOMESD_OPTIONS = st.fixed_dictionaries(
    {
        "ratio": st.floats(0.02, 0.9),
        "max_downsample": st.sampled_from([1, 2]),
        "sx": st.integers(2, 4),
        "sy": st.integers(1, 4),
        "merge_attn": st.booleans(),
        "merge_crossattn": st.booleans(),
        "merge_mlp": st.booleans(),
    }
)


ONLY_KEYS = {"attn_tokens": "k,v", "policy": Policy(keys_down_to=math.inf)}
AS_FAST = {
    "scope": "stack",
    "attn_tokens": "k,v",
    "policy": Policy(keys_down_to=2, deeper_from=0),
}
"""Settings under which merging goes by levels as under presets *balanced* and *fast*."""


def planned(count, begins=-5.3, ends=7.0, ratio=0.6):
    """The whole ones of so many evaluations between two logarithms of signal to noise."""
    return whole_evaluations(ratio, torch.linspace(begins, ends, count).tolist())


Shuffle = lossless(BipartiteStrategy)
"""A strategy that makes real plans but returns lossless ones."""


def shuffle(model, **options):
    config = ToMeConfig(**{"ratio": 0.5, **EVERYTHING, **options})
    for network, context, host in _networks_of(model):
        NetworkPatch(config, host, context, Shuffle).attach(network)


def theirs_and_ours(model, call, options):
    """The output of ``call`` with tomesd's patch on a model and with ours, without random picks."""
    outputs = []
    for library in (tomesd, tome_nodes):
        library.apply_patch(model, use_rand=False, **options)
        outputs.append(call(model))
        library.remove_patch(model)
    return outputs


class Broken:
    """A kernel that does not compile."""

    def __init__(self, error="out of resource: shared memory\nand more"):
        self._error = error

    def __getitem__(self, grid):
        raise RuntimeError(self._error)


_PARTS = ("_parameters", "_buffers", "_modules")


def attributes(model):
    """The state of a model's modules, including hooks but not their order.

    Weights and submodules have to be the same objects; the text of all numbers would take long.
    """
    return [
        (
            type(module),
            {
                name: dict(value) if name in _PARTS else repr(value)
                for name, value in vars(module).items()
            },
        )
        for module in model.modules()
    ]


@contextmanager
def input_lengths(*layers):
    """How many tokens layers are called with, as a list that grows as they are."""
    lengths = []
    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_hook(
                lambda _, inputs, __: lengths.append(inputs[0].shape[1])
            )
            hooks.enter_context(hook)
        yield lengths


def merged_everywhere(line):
    return bool(re.match(r"\[ToMe\] merged (\d+)/\1 blocks ", line))


@contextmanager
def stopped(module, error=RuntimeError):
    """A call of the module raises an error, which reaches the caller."""

    def fail(*_):
        raise error("on purpose")

    with module.register_forward_hook(fail), pytest.raises(error, match="on purpose"):
        yield


def run_tool(command, folder, home, **settings):
    """Run a command with this Python's tools, away from the user's own settings."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "HOME": str(home), "DO_NOT_TRACK": "1", **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


class FakeClock:
    """Stands for :class:`tome_nodes.ops.clock.Clock`; time passes only where a test says so."""

    can_measure = True

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def wait(self):
        pass

    def between(self, start, end):
        return end - start
