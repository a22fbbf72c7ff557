"""How much of the pack a sampling step passes through: what a reader and a CPU have to read."""

import sys
from pathlib import Path

import pytest
from comfy.patcher_extension import WrappersMP
from host import sample
from models.checkpoints import unet_settings
from models.comfyui import TINY, UNETS, build_class
from models.comfyui import sample as sample_transformer

import tome_nodes
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import PRESET, settings_of

FOLDER = f"{Path(tome_nodes.__file__).parent}/"


def profiled(profile, call, *args, **kwargs):
    """Call something while ``profile`` is told of every call."""
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return call(*args, **kwargs)
    finally:
        sys.setprofile(before)


class Trace:
    """The files and types of the pack that the third step of a run passes through."""

    def __init__(self):
        self.files, self.types = set(), set()
        self._steps = 0

    def following(self, model):
        clone = model.clone()
        wrappers = clone.wrappers.setdefault(WrappersMP.PREDICT_NOISE, {})
        wrappers["trace"] = [self._step]
        return clone

    def _step(self, executor, *args, **kwargs):
        self._steps += 1
        if self._steps != 3:
            return executor(*args, **kwargs)
        return profiled(self._call, executor, *args, **kwargs)

    def _call(self, frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(FOLDER):
            self.files.add(file.removeprefix(FOLDER))
            if "self" in frame.f_locals:
                self.types.add(type(frame.f_locals["self"]).__name__)


class Calls:
    """How many functions of Python and of C a run calls in its third step.

    The steps before it prepare what later ones use.
    """

    def __init__(self, model, tiny, size):
        self.count, self._steps = 0, 0
        clone = model.clone()
        clone.wrappers.setdefault(WrappersMP.PREDICT_NOISE, {})["calls"] = [self._step]
        sample_transformer(clone, tiny, size, steps=3)

    def _step(self, executor, *args, **kwargs):
        self._steps += 1
        if self._steps < 3:
            return executor(*args, **kwargs)
        return profiled(self._call, executor, *args, **kwargs)

    def _call(self, frame, event, argument):
        self.count += event in ("call", "c_call")


def patched(model):
    settings = settings_of(PRESET.default, {}) | {"min_tokens": 1}
    return attach(model, ToMeConfig(**settings))


def test_a_unet_passes_15_files_and_12_types(sd15):
    trace = Trace()
    sample(trace.following(patched(sd15)), steps=6)
    assert "ModuleBlock" in trace.types
    assert len(trace.files) <= 15, sorted(trace.files)
    assert len(trace.types) <= 12, sorted(trace.types)


@pytest.mark.parametrize("kind", ["flux", "wan21"])
def test_a_forecast_passes_6_files(models, kind):
    trace = Trace()
    sample_transformer(trace.following(patched(models(kind))), TINY[kind], steps=8)
    assert "Forecasts" in trace.types
    assert len(trace.files) <= 6, sorted(trace.files)


@pytest.mark.newest_only
def test_a_merged_block_adds_few_calls():
    """In a UNet with as many blocks as SDXL, and few channels."""
    settings = unet_settings(
        **{"depths": (0, 2, 10), "residuals": 2, "transformer_depth_middle": 10},
        **{"model_channels": 32, "channel_mult": (1, 2, 4), "context_dim": 32},
        **{"use_linear_in_transformer": True, "num_head_channels": 64},
        **{"num_classes": "sequential", "adm_in_channels": 32 + 6 * 256},
    )
    model, run = build_class("SDXL", settings), (UNETS["sdxl"], (16, 16))
    plain = Calls(model, *run).count
    for preset, blocks, most in (("balanced", 10, 103), ("fast", 70, 34)):
        config = ToMeConfig(**settings_of(preset, {}) | {"min_tokens": 16, "backend": "torch"})
        merging = attach(model, config)
        added = Calls(merging, *run).count - plain
        assert last_run(merging).counts.merged_blocks == blocks
        assert added / blocks <= most
