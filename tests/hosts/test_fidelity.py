"""The judges of fidelity measure what they claim to, and find no error in unpatched models."""

import json

import numpy as np
import pytest
import scipy.linalg
import torch
from host import merging
from PIL import Image

from benchmarks.fidelity import __main__ as fidelity
from benchmarks.fidelity import (
    denoiser,
    judges,
    off_and_on,
    page,
    photos,
    picture_transformer,
    pictures,
    video_transformer,
)
from tome_nodes.comfyui.attachment import attach

pytestmark = pytest.mark.newest_only


def test_all_photos_come_with_the_packages():
    for name in photos.PHOTOS:
        pixels = photos.photo(name, 32)
        assert min(pixels.shape[1:]) == 32
        assert 0 <= pixels.min() < 0.2 < 0.8 < pixels.max() <= 1


def test_held_out_crops_are_not_trained_on():
    held_out = denoiser.held_out_crops(50)
    assert {crop.photo for crop in held_out} == set(denoiser.NAMES)
    data = denoiser.Data(torch.Generator().manual_seed(0))
    trained = [data._crop(denoiser.SIDE) for _ in range(500)]
    assert not set(held_out) & set(trained)
    assert all(denoiser.is_held_out(crop.top, crop.left) for crop in held_out)


def test_frechet_distance_is_that_of_the_matrix_root():
    generator = np.random.default_rng(0)
    first = generator.normal(size=(200, 5)) @ generator.normal(size=(5, 5))
    second = generator.normal(size=(300, 5)) @ generator.normal(size=(5, 5)) + 1
    one, two = np.cov(first, rowvar=False), np.cov(second, rowvar=False)
    expected = ((first.mean(0) - second.mean(0)) ** 2).sum()
    expected += np.trace(one + two - 2 * scipy.linalg.sqrtm(one @ two).real)
    assert pictures.frechet_distance(first, second) == pytest.approx(expected)
    assert pictures.frechet_distance(first, first) == pytest.approx(0, abs=1e-9)


def test_the_spectrum_peaks_at_the_frequency_of_a_wave():
    wave = torch.sin(torch.arange(64) * 2 * torch.pi * 8 / 64).expand(1, 3, 64, 64)
    assert pictures._spectrum(wave).argmax() == 8 - 1


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """Starts a training on small crops, in its own folder."""
    monkeypatch.setattr(denoiser, "STATE", tmp_path / "state" / "training.pt")
    monkeypatch.setattr(denoiser, "WEIGHTS", tmp_path / "denoiser.npz")
    monkeypatch.setattr(denoiser, "SIDE", 32)
    return lambda: denoiser.Trainer(rate=1e-3, full_share=0.5)


def test_training_resumes_where_it_stopped(trainer):
    first = trainer()
    side, loss = first.step()
    assert side in (16, 32)
    assert 0.5 < loss < 2
    first.save()
    second = trainer()
    assert second.steps == 1
    for name, value in second.average.items():
        assert torch.equal(value, first.average[name])
    denoiser.STATE.unlink()
    from_weights = trainer()
    assert from_weights.steps == 1
    for name, value in from_weights.average.items():
        kept = first.average[name]
        assert (value - kept).abs().max() <= kept.abs().max() / 100 + 1e-3


@pytest.fixture
def transformers_in(monkeypatch, tmp_path):
    """Has the transformers train in a folder of their own."""
    for module in (picture_transformer, video_transformer):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "STATE", tmp_path / "state" / f"{name}.pt")
        monkeypatch.setattr(module, "WEIGHTS", tmp_path / f"{name}.npz")


@pytest.mark.parametrize("module", [picture_transformer, video_transformer])
def test_training_of_transformers_resumes_where_it_stopped(transformers_in, module):
    first = module.Trainer(rate=1e-3, full_share=0.0)
    _, loss = first.step()
    # The first answer is 0, and noise and pixels have a variance of about 1 each.
    assert 1 < loss < 4
    first.save()
    second = module.Trainer(rate=1e-3, full_share=0.0)
    assert second.steps == 1
    outputs = ("final_layer.linear", "head.head")
    assert any(value.any() for name, value in second.average.items() if name.startswith(outputs))
    for name, value in second.average.items():
        assert torch.equal(value, first.average[name])


@pytest.mark.parametrize(
    ("module", "judge_class"),
    [
        (picture_transformer, judges.PictureTransformerJudge),
        (video_transformer, judges.VideoTransformerJudge),
    ],
)
def test_judges_of_transformers_find_no_error_in_the_plain_model(
    transformers_in, monkeypatch, module, judge_class
):
    monkeypatch.setattr(module, "SIDE", 16)
    made = module.Trainer(rate=1e-3, full_share=0.0)
    for parameter in made.model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    made.average = made.model.state_dict()
    made.save()
    judge = judge_class(steps=2, seeds=1)
    plain, shown = judge.measure(judge.model)
    frames = (9,) if module is video_transformer else ()
    assert shown.shape == (5, 3, *frames, 16, 16)
    assert (plain["error"], plain["ssim"], plain["spectrum"]) == (0, 1, 0)
    for scope in ("module", "block", "stack"):
        config = merging(strategy="window", scope=scope, refresh_steps=4)
        merged, _ = judge.measure(attach(judge.model, config))
        assert 0 < merged["error"] < 1
        assert ("flicker" in merged) == bool(frames)


def test_flicker_is_the_error_of_changes_over_that_of_frames():
    judge = object.__new__(judges.Judge)
    judge.expected = torch.full((1, 3, 6, 16, 16), 0.5)
    steady = judge.figures(judge.expected + 0.1)
    assert steady["error"] == pytest.approx(0.1) and steady["flicker"] == pytest.approx(0, abs=1e-5)
    signs = torch.tensor([1.0, -1] * 3).view(1, 1, 6, 1, 1)
    assert judge.figures(judge.expected + 0.1 * signs)["flicker"] == pytest.approx(2)


def test_the_judge_of_pictures_finds_no_error_in_the_plain_model(trainer):
    made = trainer()
    for parameter in made.model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    made.average = made.model.state_dict()
    made.save()
    judge = pictures.PictureJudge(steps=2, seeds=1)
    plain, shown = judge.measure(judge.model)
    assert shown.shape == (5, 3, 32, 32)
    assert (plain["error"], plain["ssim"], plain["spectrum"]) == (0, 1, 0)
    merged, _ = judge.measure(attach(judge.model, merging()))
    assert json.loads(json.dumps(merged)) == merged
    assert 0 < merged["error"] < 1
    assert plain["psnr"] == merged["psnr"] == pictures.MOST_PSNR
    painted, taken = judge.paint(judge.model)
    assert torch.equal(painted, shown)
    assert len(taken) == 2 and min(taken) > 0


def test_the_denoiser_that_comes_with_the_code_paints_the_photos():
    assert denoiser.WEIGHTS.stat().st_size < 12e6
    judge = pictures.PictureJudge(steps=2, seeds=1)
    whole = {name: photos.photo(name, denoiser.SHORT_SIDE) for name in denoiser.NAMES}
    asked = torch.stack([crop.of(whole[crop.photo]) for crop in judge.crops])
    distances = (judge.expected[:, None] - asked).square().mean((2, 3, 4)).sqrt()
    assert distances.argmin(1).tolist() == [*range(len(asked))]


def test_a_transformer_paints_the_photos_and_fast_stays_closer_than_the_paper():
    assert picture_transformer.WEIGHTS.stat().st_size < 12e6
    judge = judges.PictureTransformerJudge(steps=4, seeds=1, guidance=1.0)
    names = page.FAST, page.PAPER
    fast, paper = (fidelity.methods_of_transformers()[name](judge.model) for name in names)
    assert judge.measure(fast)[0]["error"] < judge.measure(paper)[0]["error"]
    whole = {name: photos.photo(name, picture_transformer.SHORT_SIDE) for name in denoiser.NAMES}
    asked = torch.stack([crop.of(whole[crop.photo]) for crop in judge.crops])
    distances = (judge.expected[:, None] - asked).square().mean((2, 3, 4)).sqrt()
    assert distances.argmin(1).tolist() == [*range(len(asked))]


def test_a_transformer_films_the_photos_it_was_asked_for():
    assert video_transformer.WEIGHTS.stat().st_size < 12e6
    judge = judges.VideoTransformerJudge(steps=2, seeds=1, guidance=1.0)
    films, side = video_transformer.Photos(), video_transformer.SIDE
    asked = torch.stack([films.render(clip, side)[0] for clip in judge.clips])
    asked = denoiser.to_pixels(asked)
    distances = (judge.expected[:, None] - asked).square().mean((2, 4, 5)).sqrt()
    # Each frame is closer to its own clip than to the others, whether or not it is told its place.
    own = range(len(asked))
    assert distances.argmin(1).tolist() == [[clip] * video_transformer.FRAMES for clip in own]
    moved = distances.new_tensor(
        [(judge.expected[clip] - asked[clip].flip(1)).square().mean().sqrt() for clip in own]
    )
    assert (distances[own, own].mean(1) < moved).all()


def test_the_sheet_of_off_and_on_has_a_column_for_each_model():
    colours = {off_and_on.OFF: "red", "balanced": "blue"}
    columns = {name: [Image.new("RGB", (320, 320), colour)] * 2 for name, colour in colours.items()}
    sheet = off_and_on._sheet(columns, {off_and_on.OFF: 2.0, "balanced": 1.0})
    counts = {colour: count for count, colour in sheet.getcolors(2**16)}
    assert counts[255, 0, 0] == counts[0, 0, 255] == 2 * 320 * 320
    assert sheet.getpixel((320, 320)) == (255, 0, 0)
    assert sheet.getpixel((344, 320)) == (0, 0, 255)


def test_the_front_is_what_no_other_point_beats_in_time_and_error():
    points = {"slow": (0.9, 0.1), "fast": (0.5, 0.4), "beaten": (0.8, 0.5), "best": (0.6, 0.2)}
    assert page.front(points) == ["fast", "best", "slow"]


NAMES = {
    "plain": page.PLAIN,
    "ours": page.DEFAULT,
    "kv": page.KV75,
    "tomesd": page.TOMESD,
    "todo": page.TODO,
    "fast": page.FAST,
    "paper": page.PAPER,
    "pooled": page.POOLED,
    "balanced": page.BALANCED75,
}


def test_the_summary_takes_the_worst_sampling():
    def rows(**errors):
        return {NAMES[name]: {"error": error, "time": 0.5} for name, error in errors.items()}

    def flickering(**errors):
        return {name: row | {"flicker": row["error"] / 2} for name, row in rows(**errors).items()}

    result = {
        "pictures": {
            "12 steps": rows(plain=1, ours=1, tomesd=5, todo=5, kv=2, fast=4),
            "few steps": rows(plain=2, ours=1, tomesd=4, fast=3.4),
        },
        "image": {"8 steps": rows(fast=1, paper=2), "4 steps": rows(fast=3, paper=4)},
        "video": {"8 steps": flickering(fast=1, pooled=2, balanced=1)},
    }
    assert page.summary(result) == (
        "summary: image_error_vs_tomesd=0.25 kv75_error_vs_todo=0.40 fast_error_vs_tomesd=0.85 "
        "fast_time=1.00 dit_fast_error_vs_paper=0.75 video_kv_error_vs_pool=0.50 "
        "video_fast_error_vs_pool=0.50 video_flicker=0.50"
    )
    assert page.summary({}) == "summary:"


def test_the_page_says_where_each_row_comes_from():
    first = {"command": "bench", "machine": "paper", "date": "2026-01-02"}
    again = {"command": "again", "machine": "stone", "date": "2026-01-03"}
    figures = dict.fromkeys(("error", "psnr", "ssim", "spectrum"), 0.125)
    figures |= {"time": 1.0, "quartiles": [1, 1], "origin": first}
    result = {
        "pictures": {"12 steps": {"plain": figures | {"distance": 0.125}}},
        "video": {
            "4 steps": {
                "plain": figures,
                "ours": figures,
                "theirs": figures | {"flicker": 0.5, "origin": again},
            }
        },
    }
    text = page.markdown(result, "summary: all=well")
    assert "`summary: all=well`" in text
    assert text.count("`bench`, paper, 2026-01-02.") == 2
    assert text.count("Of theirs: `again`, stone, 2026-01-03.") == 1
    assert (
        "| plain    | 0.1250 | 0.1250 | 0.1250 |   0.1250 |   0.1250 | 1.00 | 1.00-1.00 |" in text
    )
    assert "| theirs  | 0.1250 | 0.1250 | 0.1250 |   0.1250 |  0.5000 | 1.00 |" in text
    assert "](fidelity-video-4-steps.webp)" in text


def test_the_time_of_a_run_is_that_over_the_plain_run_of_its_round():
    shares = fidelity.time_shares({"plain": [1.0, 2.0, 4.0], "ours": [0.5, 1.5, 1.0]})
    assert shares["ours"]["time"] == 0.5
    assert shares["plain"] == {"time": 1.0, "quartiles": [1.0, 1.0]}
