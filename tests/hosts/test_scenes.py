"""The scenes of the judges look like photos, their captions give no picture away, and their judges
say what everything that users could pick costs and changes."""

import json
import math

import pytest
import torch
from comfy.patcher_extension import WrappersMP

from benchmarks.fidelity import __main__ as fidelity
from benchmarks.fidelity import (
    edit_transformer,
    judges,
    latents,
    meter,
    options,
    page,
    photos,
    rivals,
    scene_transformer,
    scenes,
)

pytestmark = pytest.mark.newest_only

PALETTES = [torch.from_numpy(scenes._palette(index)) for index in range(scenes.PALETTES)]


def test_a_seed_makes_the_same_scene_every_time():
    first, caption = scenes.scene(5, 64)
    scenes.scene(6, 64)
    again, same = scenes.scene(5, 64)
    assert torch.equal(first, again) and caption == same
    assert first.shape == (3, 64, 64) and 0 <= first.min() < first.max() <= 1
    assert not torch.equal(first, scenes.scene(6, 64)[0])


def made_of(seeds, side):
    """The scenes of several seeds."""
    return torch.stack([scenes.scene(seed, side)[0] for seed in seeds])


def slope(pictures):
    """How the logarithm of power falls with that of frequency, in windowed square pictures."""
    side = pictures.shape[-1]
    window = torch.hann_window(side)
    centred = (pictures - pictures.mean((-1, -2), keepdim=True)) * window * window[:, None]
    power = torch.fft.fft2(centred.double()).abs().square().mean((0, 1))
    places = torch.fft.fftfreq(side) * side
    radius = (places[:, None] ** 2 + places**2).sqrt()
    rings = range(3, side // 4)
    y = torch.stack([power[(radius - ring).abs() < 0.5].mean().log() for ring in rings])
    x = torch.tensor(rings).double().log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def test_the_power_of_scenes_falls_with_frequency_as_that_of_photos():
    of_photos = [slope(photos.photo(name, 128)[None, :, :128, :128]) for name in photos.PHOTOS]
    made = made_of(range(16), 256)
    assert min(of_photos) - 0.2 < slope(made) < max(of_photos)
    assert slope(torch.rand(4, 3, 128, 128)) > -0.5


def test_larger_leaves_have_fewer_edges():
    def edges(size):
        seeds = [seed for seed in range(200) if scenes.caption_of(seed).size == size][:8]
        return made_of(seeds, 128).diff(dim=-1).abs().mean()

    small, middle, large = (edges(size) for size in range(3))
    assert small > middle > large


def test_captions_leave_open_where_anything_is():
    captions = {seed: scenes.caption_of(seed) for seed in range(400)}
    assert len({caption.palette for caption in captions.values()}) == scenes.PALETTES
    for kind, values in (("size", 3), ("fill", 3), ("letters", 2)):
        assert len({getattr(caption, kind) for caption in captions.values()}) == values
    first, second = [seed for seed in captions if captions[seed] == captions[0]][:2]
    assert torch.equal(scenes.prompt(captions[first]), scenes.prompt(captions[second]))
    one, other = (scenes.scene(seed, 64)[0] for seed in (first, second))
    # As far apart as scenes of one palette are that have nothing else in common.
    assert (one - other).square().mean().sqrt() > 0.5 * one.std()


def test_a_prompt_tells_each_part_of_a_caption_in_a_token_of_its_own():
    caption = scenes.Caption(palette=1, size=2, fill=0, letters=1)
    for place, other in enumerate(
        (
            scenes.Caption(2, 2, 0, 1),
            scenes.Caption(1, 0, 0, 1),
            scenes.Caption(1, 2, 1, 1),
            scenes.Caption(1, 2, 0, 0),
        )
    ):
        differs = (scenes.prompt(caption) != scenes.prompt(other)).any(1)
        assert differs.tolist() == [token == place for token in range(4)]


def test_decoding_is_the_inverse_of_encoding_for_what_a_latent_holds():
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(2, latents.CHANNELS, 5, 7, generator=generator) * 0.1
    assert torch.allclose(latents.encode(latents.decode(latent)), latent, atol=1e-5)
    grey = torch.full((1, 3, 8, 8), 0.3)
    assert torch.allclose(latents.decode(latents.encode(grey)), grey, atol=1e-6)
    made = made_of(range(8), 128)
    encoded = latents.encode(made)
    assert (latents.decode(encoded) - made).square().mean().sqrt() < 0.06
    assert 0.7 < encoded.square().mean() < 1.4


def test_a_forecast_runs_the_model_where_it_says():
    def pattern(steps, every=None):
        ran = (rivals.is_evaluated(step, steps, every) for step in range(steps))
        return "".join("F" if each else "S" for each in ran)

    assert pattern(8) == "FFSFSFSF"
    assert pattern(4) == "FFSF"
    assert pattern(20) == "FFFSSFSSFSSFSSFSSFSF"
    assert pattern(8, every=4) == "FFSSSFSF"
    assert pattern(8, every=1) == "F" * 8


def test_a_forecast_continues_a_straight_line_in_the_logarithm_of_signal_to_noise(
    small, monkeypatch
):
    monkeypatch.setattr(rivals, "DAMPING", 1.0)
    patched = rivals.forecast()(small.model)
    (predict,) = patched.wrappers["predict_noise"]["forecast"]
    levels = torch.linspace(0.95, 0, 9)

    def line(_x, level, *_):
        return torch.full((1,), 3 * 2 * math.log((1 - level) / level) + 1)

    options_of_run = {"transformer_options": {"sample_sigmas": levels}}
    for level in levels[:-1]:
        found = predict(line, torch.zeros(1), level[None], options_of_run, 0)
        assert found.item() == pytest.approx(line(None, float(level)).item(), rel=1e-4)


@pytest.fixture
def small(monkeypatch):
    """A judge of two small pictures."""
    monkeypatch.setattr(scene_transformer, "LATENT_SIDE", 16)
    return judges.SceneJudge(steps=8, pictures=2)


def test_everything_that_saves_time_has_its_cost_and_the_plain_model_no_error(small, monkeypatch):
    monkeypatch.setattr(fidelity, "MANY", 9)
    rows, shown = fidelity.judged(small, options.of_new_pictures(8))
    assert json.loads(json.dumps(rows)) == rows
    plain = rows[page.PLAIN]
    assert (plain["error"], plain["ssim"], plain["time"]) == (0, 1, 1)
    assert rows["5 steps"]["time"] == 5 / 8 == rows["forecast"]["time"]
    assert rows["5 steps"]["evaluations"] == rows["forecast"]["evaluations"] == 5
    attention = small.attention
    assert 0.1 < attention < 0.3
    assert rows["k,v 0.6, window 4x2"]["time"] == pytest.approx(1 - 0.6 * attention)
    quarter = (16 + 4) / (64 + 4)
    small = quarter * (1 - attention) + quarter**2 * attention
    assert rows["half the size"]["time"] == pytest.approx(small)
    assert rows["fast 0.6"]["time"] == rows["fast 0.6"]["evaluations"] / 8
    assert {pictures.shape for pictures in shown.values()} == {(2, 3, 64, 64)}


def test_easycache_does_not_write_into_the_latent_of_a_flow(small):
    """In single precision it would, without a copy."""
    patched = rivals.easy_cache(3.0)(small.model)
    was_written_to = []

    def watch(executor, x, *others, **named):
        before = x.clone()
        answer = executor(x, *others, **named)
        was_written_to.append(not torch.equal(before, x))
        return answer

    patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "watch", watch)
    counted = meter.Meter(small.tokens)
    with counted.watching(patched):
        small.pictures(patched)
    assert counted.evaluations < len(was_written_to) == 8
    assert not any(was_written_to)


def test_an_edit_has_the_leaves_of_one_scene_in_the_colours_of_another():
    edited, leaves, colours, prompt = edit_transformer.edit(5)
    assert edited.shape == leaves.shape == colours.shape == (8, 64, 64)
    pixels, _, like = latents.decode(torch.stack([edited, leaves, colours])).flatten(2).mT
    near = [torch.cdist(pixels, palette).min(1).values.mean() for palette in PALETTES]
    nearer = [torch.cdist(like, palette).min(1).values.mean() for palette in PALETTES]
    assert near.index(min(near)) == nearer.index(min(nearer)) != scenes.caption_of(5).palette
    brightness = torch.stack([edited[0].flatten(), leaves[0].flatten(), colours[0].flatten()])
    _, like_first, like_second = torch.corrcoef(brightness)[0]
    assert like_first > 0.5 > like_second
    told = [part.any().item() for part in prompt]
    assert told == [False, True, False, True]


def test_the_transformer_of_edits_follows_its_references():
    assert edit_transformer.WEIGHTS.stat().st_size < 5e6
    judge = judges.EditJudge(steps=3)
    seeds = range(edit_transformer.HELD_OUT, edit_transformer.HELD_OUT + 4)
    wanted = latents.decode(torch.stack([edit_transformer.edit(seed)[0] for seed in seeds]))
    distances = (judge.expected[:, None] - wanted).square().mean((2, 3, 4)).sqrt()
    assert distances.argmin(1).tolist() == [0, 1, 2, 3]
