"""The judges of fidelity measure what they claim to, and find no error in unpatched models."""

import dataclasses
import json
import sys
from types import SimpleNamespace

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
    meter,
    off_and_on,
    options,
    page,
    photos,
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


def test_crops_that_are_judged_were_held_out():
    held_out = denoiser.held_out_crops(50)
    assert {crop.photo for crop in held_out} == set(denoiser.NAMES)
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


def picked(**settings):
    """Merging with some settings, to be judged."""
    return options.Option(
        str(settings), page.OURS, lambda model: attach(model, merging(**settings))
    )


def test_the_judge_of_videos_finds_no_error_in_the_plain_model(monkeypatch):
    monkeypatch.setattr(fidelity, "MANY", 3)
    monkeypatch.setattr(video_transformer, "SIDE", 64)
    judge = judges.VideoJudge(steps=2)
    merged = [
        picked(strategy="window", scope=scope, refresh_steps=4) for scope in ("module", "stack")
    ]
    rows, shown = fidelity.judged(judge, merged)
    plain = rows[page.PLAIN]
    assert shown[page.PLAIN].shape == (2, 3, 9, 64, 64)
    assert (plain["error"], plain["ssim"], plain["spectrum"], plain["time"]) == (0, 1, 0, 1)
    assert "flicker" not in plain
    for option in merged:
        assert 0 < rows[option.name]["error"] < 1
        assert rows[option.name]["flicker"] > 0


def test_flicker_is_the_error_of_changes_over_that_of_frames():
    judge = object.__new__(judges.Judge)
    judge.expected = torch.full((1, 3, 6, 16, 16), 0.5)
    steady = judge.figures(judge.expected + 0.1)
    assert steady["error"] == pytest.approx(0.1) and steady["flicker"] == pytest.approx(0, abs=1e-5)
    signs = torch.tensor([1.0, -1] * 3).view(1, 1, 6, 1, 1)
    assert judge.figures(judge.expected + 0.1 * signs)["flicker"] == pytest.approx(2)


def test_the_judge_of_pictures_finds_no_error_in_the_plain_model(monkeypatch):
    monkeypatch.setattr(fidelity, "MANY", 3)
    monkeypatch.setattr(denoiser, "SIDE", 32)
    judge = pictures.PictureJudge(steps=2)
    merged = picked()
    rows, shown = fidelity.judged(judge, [merged])
    assert json.loads(json.dumps(rows)) == rows
    plain, ours = rows[page.PLAIN], rows[merged.name]
    assert shown[page.PLAIN].shape == (5, 3, 32, 32)
    assert (plain["error"], plain["ssim"], plain["spectrum"]) == (0, 1, 0)
    assert 0 < ours["error"] < 1
    assert ours["psnr"] < plain["psnr"] == pictures.MOST_PSNR
    assert plain["evaluations"] == ours["evaluations"] == 2
    assert plain["time"] == 1 > ours["time"] > 0.5


def test_the_denoiser_that_comes_with_the_code_paints_the_photos():
    assert denoiser.WEIGHTS.stat().st_size < 12e6
    judge = pictures.PictureJudge(steps=2)
    whole = {name: photos.photo(name, denoiser.SHORT_SIDE) for name in denoiser.NAMES}
    asked = torch.stack([crop.of(whole[crop.photo]) for crop in judge.crops])
    distances = (judge.expected[:, None] - asked).square().mean((2, 3, 4)).sqrt()
    assert distances.argmin(1).tolist() == [*range(len(asked))]


def test_the_transformer_of_videos_films_scenes_that_move():
    assert video_transformer.WEIGHTS.stat().st_size < 5e6
    judge = judges.VideoJudge(steps=4, guidance=1.0)
    film = judge.expected
    assert film.shape == (2, 3, video_transformer.FRAMES, 128, 128)
    assert film.std() > 0.05
    from_frame_to_frame = film.diff(dim=2).square().mean().sqrt()
    between_clips = (film[0] - film[1]).square().mean().sqrt()
    assert 0.01 < from_frame_to_frame < 0.5 * between_clips


def test_the_work_of_attention_and_of_layers_is_counted_where_it_is_done():
    layer = torch.nn.Linear(8, 16)
    model = SimpleNamespace(model=SimpleNamespace(diffusion_model=SimpleNamespace(out=layer)))
    counted = meter.Meter(None)
    query, key = torch.randn(2, 3, 10, 8), torch.randn(2, 3, 4, 8)
    with counted.watching(model):
        layer(query)
        torch.nn.functional.scaled_dot_product_attention(query, key, key)
    assert counted.evaluations == 1
    assert counted.cost == 2 * (60 * 8 * 16) + 2 * (2 * 3 * 10 * 4 * (8 + 8))


def test_the_sheet_of_off_and_on_has_a_column_for_each_model():
    colours = {off_and_on.OFF: "red", "balanced": "blue"}
    columns = {name: [Image.new("RGB", (320, 320), colour)] * 2 for name, colour in colours.items()}
    sheet = off_and_on._sheet(columns, {off_and_on.OFF: 2.0, "balanced": 1.0})
    counts = {colour: count for count, colour in sheet.getcolors(2**16)}
    assert counts[255, 0, 0] == counts[0, 0, 255] == 2 * 320 * 320
    assert sheet.getpixel((320, 320)) == (255, 0, 0)
    assert sheet.getpixel((344, 320)) == (0, 0, 255)


NAMES = {
    "plain": page.PLAIN,
    "ours": page.DEFAULT,
    "kv": page.KEYS75,
    "tomesd": page.TOMESD,
    "todo": page.TODO,
    "fast": page.FAST,
    "paper": page.PAPER,
}


def row(kind, time, error, **others):
    figures = {"evaluations": 8, "psnr": 30.0, "ssim": 0.9, "spectrum": 0.1}
    return {"kind": kind, "time": time, "error": error, "error against many": error} | (
        figures | others
    )


def test_the_summary_takes_the_worst_number_of_steps():
    def rows(**errors):
        return {NAMES[name]: row(page.MERGING, 0.5, error) for name, error in errors.items()}

    def flickering(**errors):
        return {name: row | {"flicker": row["error"] / 2} for name, row in rows(**errors).items()}

    result = {
        "pictures": {
            "12": rows(plain=1, ours=1, tomesd=5, todo=5, kv=2, fast=4),
            "8": rows(plain=2, ours=1, tomesd=4, fast=3.4),
        },
        "image": {"8": rows(fast=1, paper=2), "20": rows(fast=3, paper=4)},
        "second": {"8": {page.PLAIN: row("plain", 1.0, 0.0), page.FAST: row(page.OURS, 0.8, 0.1)}},
        "video": {"8": flickering(fast=1, todo=2, kv=1)},
    }
    assert page.summary(result) == (
        "summary: image_error_vs_tomesd=0.25 kv75_error_vs_todo=0.40 fast_error_vs_tomesd=0.85 "
        "fast_time=1.00 dit_fast_error_vs_paper=0.75 video_kv_error_vs_todo=0.50 "
        "video_fast_error_vs_todo=0.50 video_flicker=0.50 second_pass_speedup=1.25"
    )
    assert page.summary({}) == "summary:"


ROWS = {
    "plain": row("plain", 1.0, 0.0),
    "6 steps": row(page.STEPS, 0.8, 0.1),
    "4 steps": row(page.STEPS, 0.4, 0.3),
    "EasyCache 0.2": row(page.CACHE, 1.0, 0.0),
    "forecast": row(page.FORECAST, 0.6, 0.05),
    "q,k,v 0.5, as the paper": row(page.MERGING, 0.95, 0.6),
    "k,v 0.5, unweighted": row(page.MERGING, 0.95, 0.3),
    "balanced": row(page.OURS, 0.9, 0.04),
    "fast": row(page.OURS, 0.6, 0.4),
}


def test_our_best_preset_is_compared_with_rivals_in_its_time():
    # At 0.9, halfway between six steps and the plain run, fewer steps have an error of 0.05.
    assert page.best_share(ROWS, page.STEPS) == pytest.approx(0.04 / 0.05)
    assert page.best_share(ROWS, page.CACHE) is None
    both = {"image": {"20": ROWS, "8": ROWS | {"fast": row(page.OURS, 0.6, 0.1)}}}
    # At 0.6, halfway between six and four steps, it is 0.2; the worst number of steps counts.
    assert page.summary(both) == "summary: vs_fewer_steps_image=0.80"


def test_rivals_are_compared_at_any_time():
    rivals_at = [(0.4, 0.3), (0.8, 0.1), (0.9, 0.2)]
    assert page.error_at(0.6, rivals_at) == pytest.approx(0.2)
    assert page.error_at(0.2, rivals_at) == pytest.approx(0.3)
    assert page.error_at(0.9, rivals_at) == pytest.approx(0.05)
    assert page.error_at(0.5, []) is None


def test_the_table_marks_what_nothing_beats(tmp_path):
    text = page.table(ROWS, "8 steps")
    for name in ("6 steps", "4 steps", "forecast", "balanced"):
        assert (f"| **{name}**" in text) == (name != "6 steps")
    assert "**fast**" not in text and "**plain**" not in text
    page.plot({"8": ROWS}, "judge", tmp_path / "front.webp")
    assert (tmp_path / "front.webp").stat().st_size > 1000


def test_a_sheet_has_a_row_for_each_of_the_pictures_that_are_shown(tmp_path):
    batch = torch.full((3, 3, 64, 64), 0.5)
    videos = batch[:, :, None].repeat(1, 1, 6, 1, 1)
    for shown in (batch, videos):
        page.sheet({page.FAST: shown, page.PLAIN: shown, "other": shown}, tmp_path / "sheet.webp")
        columns = 3 if shown is batch else 2 * 3
        assert Image.open(tmp_path / "sheet.webp").size == (190 + columns * 128, 2 * 128)


def test_the_page_says_where_each_row_comes_from():
    first = {"command": "bench", "machine": "paper", "date": "2026-01-02"}
    again = {"command": "again", "machine": "stone", "date": "2026-01-03"}
    plain = row("plain", 1.0, 0.0, origin=first)
    result = {
        "pictures": {"12": {"plain": plain | {"distance": 0.125}}},
        "few_multistep": {"8": {"plain": plain}},
        "video": {
            "8": {
                "plain": plain,
                "ours": row(page.OURS, 0.5, 0.25, origin=first),
                "theirs": row(page.CACHE, 0.5, 0.5, origin=again, flicker=0.5),
            }
        },
    }
    text = page.markdown(result, "summary: all=well")
    assert "`summary: all=well`" in text
    assert text.count("`bench`, paper, 2026-01-02.") == 3
    assert text.count("Of theirs: `again`, stone, 2026-01-03.") == 1
    cells = [[cell.strip() for cell in line.split("|")[1:7]] for line in text.splitlines()]
    assert ["**ours**", "ours", "0.50", "8", "0.2500", "0.2500"] in cells
    for judge in result:
        assert f"](fidelity-{judge}.webp)" in text
        assert (f"](fidelity-{judge}-pictures.webp)" in text) == (judge != "few_multistep")


def test_a_judge_is_asked_what_the_command_line_says(monkeypatch):
    made = []
    benches = {
        name: dataclasses.replace(bench, make=lambda steps, seeds: made.append(steps))
        for name, bench in judges.BENCHES.items()
    }
    monkeypatch.setattr(judges, "BENCHES", benches)

    def asked(*given):
        monkeypatch.setattr(sys, "argv", ["bench", *given])
        return {
            (name, steps): [option.name for option in chosen]
            for name, steps, _, chosen in fidelity.asked(fidelity._arguments())
        }

    assert list(benches) == list(page.JUDGES)
    everything = asked()
    assert {name for name, _ in everything} == set(page.JUDGES)
    quick = asked("--quick")
    under_euler = [name for name in page.JUDGES if name not in page.SAMPLED_OTHERWISE]
    assert [name for name, _ in quick] == under_euler
    for key, names in quick.items():
        assert set(names) < set(everything[key]) and page.FAST in names
    assert asked("--only", "image", "--steps", "8", "--names", "6 steps", "forecast") == {
        ("image", 8): ["6 steps", "forecast"]
    }
    made.clear()
    with pytest.raises(SystemExit, match=r"--names has \['7 leaps'\]; there are .*6 steps"):
        asked("--names", "7 leaps")
    assert not made
