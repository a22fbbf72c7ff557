"""On trained transformers, the default forecasts what the pages promise, and changes less than
fewer steps do."""

import pytest
import torch

from benchmarks.fidelity import judges, options, pictures, scene_transformer, video_transformer
from benchmarks.fidelity.meter import Meter

pytestmark = pytest.mark.newest_only

FORECAST = [
    # Of 20 steps of a video, two more run as noise falls unevenly around them.
    *(("image", 8, 2, 64), ("image", 20, 10, 32), ("video", 8, 2, 32), ("video", 20, 8, 32)),
    *(("few", 4, 1, 32), ("few", 8, 2, 32), ("few_multistep", 8, 2, 64)),
    *(("second", 8, 3, 32), ("video_multistep", 8, 2, 32), ("edit", 8, 3, 32), ("edit", 4, 0, 32)),
]
"""Judges, steps, how many of them the default forecasts, and the side of latents in cells of four
pixels; videos have half of it."""


@pytest.mark.parametrize(("name", "steps", "forecast", "side"), FORECAST)
def test_the_default_forecasts_steps_and_changes_less_than_as_many_fewer(
    name, steps, forecast, side, monkeypatch
):
    of_all = scene_transformer.held_out

    def held_out(of):
        one = of_all(of)[:1]
        return one[..., :side, :side] if one.ndim == 4 else one

    monkeypatch.setattr(scene_transformer, "held_out", held_out)
    monkeypatch.setattr(scene_transformer, "LATENT_SIDE", side)
    monkeypatch.setattr(video_transformer, "SIDE", 2 * side)
    judge = judges.BENCHES[name].make(steps)
    patched = options.preset("balanced")(judge.model)
    meter = Meter(judge.tokens, judge.attention)
    with meter.watching(patched):
        ours = judge.pictures(patched)
    assert meter.evaluations == steps - forecast
    if not forecast:
        assert torch.equal(ours, judge.expected)
        return
    fewer = judge.pictures(judge.model, steps - forecast)
    error, others = (pictures.rms(each - judge.expected) for each in (ours, fewer))
    assert 0 < error < others
