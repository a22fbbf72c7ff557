"""How much of the pack a sampling step passes through: what a reader of it has to read."""

import sys
from pathlib import Path

import pytest
from comfy.patcher_extension import WrappersMP
from host import sample
from models.comfyui import TINY
from models.comfyui import sample as sample_transformer

import tome_nodes
from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import PRESET, settings_of

FOLDER = f"{Path(tome_nodes.__file__).parent}/"


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
        before = sys.getprofile()
        sys.setprofile(self._call)
        try:
            return executor(*args, **kwargs)
        finally:
            sys.setprofile(before)

    def _call(self, frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(FOLDER):
            self.files.add(file.removeprefix(FOLDER))
            if "self" in frame.f_locals:
                self.types.add(type(frame.f_locals["self"]).__name__)


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
