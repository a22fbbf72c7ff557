"""The line on a run that gained nothing says who is in the way, and what to do."""

import time
from functools import partial

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras import nodes_hypertile, nodes_tomesd
from host import merging, preset
from models.comfyui import TINY, UNETS, sample
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tome_nodes import reasons
from tome_nodes.comfyui import step_count
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.report.pages import in_words
from tome_nodes.run import sampling_run


def core_tome(model):
    return nodes_tomesd.TomePatchModel.execute(model, 0.3).args[0]


def hyper_tile(model):
    return nodes_hypertile.HyperTile.execute(model, 64, 2, 0, False)[0]


def partly_applied(model):
    """A node whose function is given some of its arguments before."""
    patched = hyper_tile(model)
    patches = patched.model_options["transformer_options"]["patches"]
    patches["attn1_patch"] = [partial(patches["attn1_patch"][0])]
    return patched


def running_by_itself(model):
    """A node that runs the network itself, and calls nothing that it is given."""

    def run(apply_model, given):
        base, (x, level), conditions = model.model, (given["input"], given["timestep"]), given["c"]
        sampling, options = base.model_sampling, conditions["transformer_options"]
        others = {"y": conditions["y"]} if "y" in conditions else {}
        output = base.diffusion_model(
            *(sampling.calculate_input(level, x), sampling.timestep(level).float()),
            context=conditions["c_crossattn"],
            transformer_options=options,
            **others,
        )
        return sampling.calculate_denoised(level, output, x)

    patched = model.clone()
    patched.set_model_unet_function_wrapper(run)
    return patched


def without_blocks(model):
    """A node that takes another network's answer for that of ours."""
    patched = model.clone()
    patched.add_wrapper(WrappersMP.DIFFUSION_MODEL, lambda executor, x, *args, **kwargs: 0 * x)
    return patched


@pytest.mark.parametrize("patch", [running_by_itself, without_blocks])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("sd15", "balanced"), ("sd15", "paper"), ("sdxl", "balanced"), ("sdxl", "fast")],
)
def test_a_node_that_runs_the_model_by_itself_is_said_to(models, log_messages, kind, name, patch):
    last = run(models, kind, preset(name), patch, steps=8, size=(32, 32))
    (line,) = log_messages()
    assert line.startswith("[ToMe] nothing merged")
    assert line.endswith(f": {reasons.NOT_CALLED}") and line.count("another node") == 1
    assert in_words(last)[0].startswith("Nothing merged")


def test_that_is_also_said_where_nothing_would_merge_anyway(models, log_messages):
    run(models, "sd15", preset("balanced", min_tokens=10**6), without_blocks, steps=8)
    (line,) = log_messages()
    assert reasons.NOT_CALLED.why in line and reasons.NEVER_SHALLOW.why not in line


def run(models, kind, config, patch=None, **options):
    model = models(kind) if patch is None else patch(models(kind))
    patched = model if config is None else attach(model, config)
    size = options.pop("size", (16, 16))
    sample(patched, UNETS[kind] if kind in UNETS else TINY[kind], size, **options)
    return last_run(patched)


@pytest.mark.parametrize(
    ("kind", "config", "options", "who", "what_to_do"),
    [
        (
            *("flux", preset("balanced", end_percent=0.1), {"steps": 8}),
            *("covers only steps in which the model always runs", "widen them"),
        ),
        (
            *("sd15", preset("balanced"), {"steps": 1, "patch": core_tome}),
            *("core's node TomePatchModel merges the same tokens", "remove that node"),
        ),
        (
            *("sd15", preset("balanced"), {"steps": 1, "patch": hyper_tile}),
            *("another node (nodes_hypertile) masks", "leave one of the two out"),
        ),
        (
            *("sd15", preset("balanced"), {"steps": 1, "patch": partly_applied}),
            *("another node (nodes_hypertile) masks", "leave one of the two out"),
        ),
        (
            *("sdxl", preset("balanced"), {"steps": 1, "size": (32, 32)}),
            *("little of this model's time is in self-attention", "preset fast saves most"),
        ),
    ],
)
def test_a_line_says_who_is_in_the_way_and_what_to_do(
    models, caplog, kind, config, options, who, what_to_do
):
    caplog.set_level("INFO", logger="tome_nodes")
    run(models, kind, config, **options)
    (line,) = (record.getMessage() for record in caplog.records if record.name == "tome_nodes")
    assert who in line and what_to_do in line.partition(who)[2]


@pytest.mark.parametrize(
    ("kind", "preset_name", "what"),
    [
        ("sd15", "fast", "merged, and no step was shallow"),
        ("flux", "balanced", "was forecast"),
    ],
)
def test_a_second_pass_that_begins_behind_end_percent_says_where_it_begins(
    models, caplog, kind, preset_name, what
):
    config = preset(preset_name, end_percent=0.5)
    run(models, kind, config, steps=8, denoise=0.4, picture=1.0, scheduler="simple")
    assert caplog.messages[-1] == (
        f"[ToMe] nothing {what}: start_percent=0.0 to end_percent=0.5 covers no step of this run, "
        "which begins at 0.60 of the model's whole schedule; widen them"
    )


@pytest.mark.parametrize(("idle", "waits"), [([True, True, False], True), ([False] * 3, False)])
def test_a_gpu_that_waits_for_its_cpu_is_named(models, caplog, monkeypatch, idle, waits):
    """No GPU is there, so what it would say stands in."""
    caplog.set_level("INFO", logger="tome_nodes")
    monkeypatch.setattr(step_count, "GPUS", {"cpu", "cuda"})
    order = []

    def asked(device):
        order.append("asked")
        return idle.pop()

    class Marked(sampling_run.Clock):
        def now(self):
            order.append("marked")
            return super().now()

    monkeypatch.setattr(step_count, "has_nothing_to_do", asked)
    monkeypatch.setattr(sampling_run, "Clock", Marked)
    run(models, "sd15", merging(), steps=3)
    assert not idle and (str(reasons.GPU_WAITS) in caplog.messages[-1]) == waits
    # A mark is work for the GPU, so it comes after the question.
    assert order == ["marked", "asked", "marked", "asked", "marked", "asked"]


@pytest.mark.parametrize(
    ("kind", "config", "seconds", "words"),
    [
        (
            *("flux", preset("balanced"), [9, 2, 0.5, 2, 0.5, 2, 0.5]),
            "saved 4.5 s (28%): a step took 2 s with the model, 0.5 s forecast",
        ),
        (
            *("sd15", merging(start_percent=0.5), [9, 2, 2, 2, 1, 1, 1]),
            "saved 4 s (25%): a step took 2 s on all tokens, 1 s merged",
        ),
        (
            *("sd15", merging(scope="stack"), [9, 1, 1, 1, 1, 1, 1]),
            "expected, not measured: 12% fewer multiplications in a merged step",
        ),
        (
            *("sd15", merging(start_percent=0.5), [9, 1, 1, 1, 1, 1, 1]),
            "no gain: a step took 1 s on all tokens, 1 s merged",
        ),
        (
            *("sd15", merging(attn_tokens="k,v"), [9, 1, 1, 1, 1, 1, 1]),
            "expected, not measured: 5% fewer multiplications in a merged step",
        ),
    ],
)
def test_a_run_of_eight_steps_says_whether_it_helped(
    models, caplog, monkeypatch, kind, config, seconds, words
):
    """It takes the times of all steps but the last; the first, where devices warm up, is long."""
    caplog.set_level("INFO", logger="tome_nodes")
    times = iter([sum(seconds[:step]) for step in range(8)])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times, sum(seconds)))
    lines = in_words(run(models, kind, config, steps=8))
    assert caplog.messages[-1].endswith(f"; {words}")
    assert lines[1] == f"Helped: {words}"
    assert any("ask ToMe Tune" in line for line in lines) == ("expected" in words)


class Doubles(TorchDispatchMode):
    """The operations that give float64."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        dtypes = {getattr(leaf, "dtype", None) for leaf in pytree.tree_leaves(result)}
        if torch.float64 in dtypes:
            self.seen.add(str(function))
        return result


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *(("sd15", merging(strategy=name, merge_mlp=True)) for name in ("bipartite", "cluster")),
        ("sd15", preset("balanced", ratio_end=0.2)),
        ("sd15", merging(scope="stack", merge_crossattn=True)),
        ("flux", merging(strategy="window")),
        ("flux", preset("balanced")),
    ],
)
def test_nothing_is_computed_in_float64_that_the_model_alone_does_not(models, kind, config):
    """Apple's GPUs have none."""
    models(kind)
    seen = []
    for settings in None, config:
        with Doubles() as doubles:
            run(models, kind, settings, steps=8 if config.forecast else 3)
        seen.append(doubles.seen)
    assert seen[1] <= seen[0]
    assert not seen[0] or kind == "flux"
