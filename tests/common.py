"""What the tests of all hosts share."""

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
from tome_nodes.pytorch.patch import _found
from tome_nodes.pytorch.patched_model import Attachment
from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.strategies.bipartite import BipartiteStrategy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where models run."""

BACKEND = "triton" if DEVICE.type == "cuda" else "torch"
"""What merging runs on there by default."""

EVERYTHING = {
    "max_downsample": 8,
    "min_tokens": 1,
    "merge_attn": True,
    "merge_crossattn": True,
    "merge_mlp": True,
}
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
"""Options of tomesd, except random picks."""


scopes_and_tokens = pytest.mark.parametrize(
    ("scope", "attn_tokens"),
    [
        *(("module", choice) for choice in OPTIONS["attn_tokens"].choices),
        ("stack", "q,k,v"),
    ],
)


Shuffle = lossless(BipartiteStrategy)
"""A strategy that makes real plans but returns lossless ones."""


def shuffle(model, **options):
    """Attach the lossless plan to a model that :func:`tome_nodes.apply_patch` takes."""
    config = ToMeConfig(**{"ratio": 0.5, **EVERYTHING, **options})
    for network, context, host in _found(model):
        Attachment(config, host, context, Shuffle).attach(network)


class Counted(BipartiteStrategy):
    """Counts the requests for plans, including the one with few tokens that tests the device."""

    made = 0

    def plan(self, features, grid, ratio):
        Counted.made += 1
        return super().plan(features, grid, ratio)


def theirs_and_ours(model, call, options):
    """The output of ``call`` with tomesd's patch on a model and with ours, without random picks."""
    outputs = []
    for library in (tomesd, tome_nodes):
        library.apply_patch(model, use_rand=False, **options)
        outputs.append(call(model))
        library.remove_patch(model)
    return outputs


def attributes(model):
    """The state of a model's modules, including hooks but not their order."""
    return [
        (type(module), {name: repr(value) for name, value in vars(module).items()})
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
    """Whether all blocks merged in a run, by its line in the log."""
    return bool(re.match(r"\[ToMe\] merged (\d+)/\1 blocks ", line))


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
    """Norm of the difference over the norm of ``expected``."""
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
