"""The judges of fidelity measure what they claim to, and find no error in unpatched models."""

import json
from dataclasses import replace

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from common import relative_error
from host import merging

from benchmarks.fidelity import __main__ as fidelity
from benchmarks.fidelity import (
    deep_cache,
    denoiser,
    few_steps,
    judges,
    latents,
    meter,
    options,
    page,
    pictures,
    rivals,
    scene_transformer,
    shares,
    sticker_unet,
    sticker_unet_diffusers,
    sticker_unet_sd15,
    video_transformer,
    weights,
)
from benchmarks.fidelity.training import __main__ as training
from benchmarks.fidelity.training.__main__ import Training, course_of
from tome_nodes.comfyui.attachment import attach

pytestmark = pytest.mark.newest_only


def picked(**settings):
    return options.Option(
        str(settings), shares.OURS, lambda model: attach(model, merging(**settings))
    )


def test_the_judge_of_videos_finds_no_error_in_the_plain_model(monkeypatch):
    monkeypatch.setattr(video_transformer, "SIDE", 64)
    judge = judges.VideoJudge(steps=2)
    merged = [picked(strategy="window", scope=scope) for scope in ("module", "stack")]
    rows, shown = fidelity.judged(judge, merged)
    plain = rows[page.PLAIN]
    assert torch.equal(judge.pictures(judge.model), shown[page.PLAIN])
    assert shown[page.PLAIN].shape == (2, 3, 9, 64, 64)
    assert (plain["error"], plain["ssim"], plain["time"]) == (0, 1, 1)
    assert "flicker" not in plain
    for option in merged:
        assert 0 < rows[option.name]["error"] < 1
        assert rows[option.name]["flicker"] > 0


def test_the_judge_of_pictures_finds_no_error_in_the_plain_model(monkeypatch):
    monkeypatch.setattr(denoiser, "SIDE", 32)
    judge = pictures.PictureJudge(steps=2)
    merged = picked()
    rows, shown = fidelity.judged(judge, [merged])
    assert json.loads(json.dumps(rows)) == rows
    plain, ours = rows[page.PLAIN], rows[merged.name]
    assert torch.equal(judge.pictures(judge.model), shown[page.PLAIN])
    assert shown[page.PLAIN].shape == (5, 3, 32, 32)
    assert (plain["error"], plain["ssim"]) == (0, 1)
    assert 0 < ours["error"] < 1
    assert 0 < ours["ssim"] < 1
    assert plain["evaluations"] == ours["evaluations"] == 2
    assert plain["time"] == 1 > ours["time"] > 0.5


def test_fewer_merged_steps_are_whole_and_merge_the_same(monkeypatch):
    monkeypatch.setattr(denoiser, "SIDE", 32)
    judge = pictures.PictureJudge(steps=12, photos=1)
    names = "fast 0.6", "fast 0.6, 12 steps", "fast 0.6, 6 steps"
    asked = {option.name: option for option in options.of_other_runs(12)}
    rows, _ = fidelity.judged(judge, [asked[name] for name in names])
    both, merged, fewer = (rows[name] for name in names)
    assert both["evaluations"] == merged["evaluations"] == 12 > fewer["evaluations"] == 6
    assert fewer["time"] == pytest.approx(0.5 * merged["time"])
    assert 0.45 * merged["time"] < both["time"] < 0.7 * merged["time"]
    assert 0 < merged["error"] < min(both["error"], fewer["error"])


def test_a_judge_without_weights_names_the_command_that_trains_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sticker_unet_sd15, "STATE", tmp_path / "state.pt")
    with pytest.raises(SystemExit, match="bench --train stickers_sd15"):
        judges.BENCHES["stickers_sd15"].make(20)


def test_a_grown_unet_paints_what_the_smaller_one_paints_and_its_training_goes_on(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(training, "Stickers", _OnePicture)
    monkeypatch.setattr(sticker_unet_sd15, "STATE", tmp_path / "state.pt")
    monkeypatch.setattr(sticker_unet, "SIDE", 16)
    course = replace(course_of("stickers_sd15"), sizes=((16, 2), (16, 2)))
    first = Training(course, rate=1e-3)
    first.save()
    smaller, grown = (judges.BENCHES[name].make(2) for name in ("stickers", "stickers_sd15"))
    assert relative_error(grown.expected, smaller.expected) < 1e-3
    first.step()
    first.save()
    again = Training(course, rate=1e-3)
    assert again.steps == 1
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    trained = judges.BENCHES["stickers_sd15"].make(2)
    assert not torch.equal(trained.expected, grown.expected)


def test_weights_are_kept_to_half_a_step(tmp_path):
    generator = torch.Generator().manual_seed(0)
    kept = {
        "matrix": torch.randn(6, 4, 3, generator=generator),
        "bias": torch.randn(6, generator=generator),
        "zeros": torch.zeros(2, 2),
    }
    for file in ("one.npz", "other.npz"):
        weights.save(kept, tmp_path / file)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "other.npz").read_bytes()
    read = weights.load(tmp_path / "one.npz")
    steps = kept["matrix"].flatten(1).abs().amax(1) / 64
    gaps = (read["matrix"] - kept["matrix"]).flatten(1).abs().amax(1)
    assert (gaps <= 0.51 * steps).all()
    assert torch.allclose(read["bias"], kept["bias"], atol=1e-3)
    assert torch.equal(read["zeros"], kept["zeros"])


def test_a_latent_holds_what_its_frequencies_can():
    latent = 0.1 * torch.randn(2, 8, 4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(latents.encode(latents.decode(latent)), latent, atol=1e-5)


class _OnePicture:
    """Takes the place of pictures that need a font."""

    def __init__(self, generator):
        pass

    def batch(self, size, side):
        latent = torch.linspace(-1, 1, side).expand(size, 8, side, side)
        return latent, torch.zeros(size, 2, 64)


def test_the_unet_of_stickers_learns_noise_and_its_weights_paint(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "Stickers", _OnePicture)
    course = replace(
        course_of("stickers"),
        state=tmp_path / "state.pt",
        sizes=((16, 2), (16, 2)),
        begin=lambda unet: {},
    )
    with torch.random.fork_rng():
        # Not by what other tests have drawn before.
        torch.manual_seed(1)
        learning = Training(course, rate=3e-3)
        losses = [learning.step()[1] for _ in range(30)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    weights.save(learning.average, tmp_path / "stickers.npz")
    monkeypatch.setattr(sticker_unet, "WEIGHTS", tmp_path / "stickers.npz")
    monkeypatch.setattr(sticker_unet, "SIDE", 16)
    judge = judges.StickerJudge(2, pictures=2)
    assert judge.expected.shape == (2, 3, 64, 64)
    assert judge.figures(judge.expected)["error"] == 0


def test_deep_cache_runs_the_whole_unet_in_every_step_of_its_interval(monkeypatch):
    monkeypatch.setattr(sticker_unet, "SIDE", 16)
    judge = judges.StickerJudge(5, pictures=1)
    asked = [options.Option(str(each), "", rivals.deep_cache(each)) for each in (1, 2, 5)]
    rows, _ = fidelity.judged(judge, asked)
    outer = (rows["5"]["time"] - 0.2) / 0.8
    assert (rows["1"]["error"], rows["1"]["time"]) == (0, 1)
    assert 0 < outer < 0.1
    assert rows["2"]["time"] == pytest.approx(0.6 + 0.4 * outer)
    assert 0 < rows["2"]["error"] < rows["5"]["error"]


def test_the_unet_of_stickers_answers_in_diffusers_as_it_does_here():
    latent = torch.randn(1, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    prompt, time = sticker_unet.prompt(3, 2)[None], torch.tensor([500.0])
    expected = sticker_unet.load().model.diffusion_model(latent, time, context=prompt)
    answer = sticker_unet_diffusers.load()(latent, time, encoder_hidden_states=prompt).sample
    assert relative_error(answer, expected) < 1e-5


def test_ours_runs_as_many_whole_steps_in_diffusers_as_deep_cache_would(monkeypatch):
    monkeypatch.setattr(deep_cache, "SIDE", 16)
    monkeypatch.setattr(deep_cache, "PICTURES", 1)
    painter = deep_cache.Painter("euler", steps=8)
    expected, work = painter.paint()
    painted, left = painter.shallow(whole=4)
    outer = (left / work - 4 / 8) / (4 / 8)
    assert 0 < outer < 0.1
    assert 0 < relative_error(painted, expected) < 1
    assert torch.equal(painter.paint()[0], expected)
    assert shares.spread([1.0, 6.0, 2.0], [1.0, 2.0, 4.0]) == "1.00 (0.50 to 3.00)"


def test_few_steps_are_judged_on_other_scenes_by_as_many_evaluations(monkeypatch):
    monkeypatch.setattr(scene_transformer, "LATENT_SIDE", 16)
    monkeypatch.setitem(few_steps.RUNS, "few", ("few", 4, 1, {}))
    found = few_steps.compared("few")
    rows = found["rows"]
    assert [rows[name]["evaluations"] for name in ("ours", "line", "fewer")] == [[3]] * 3
    ours, line, fewer = (rows[name]["scenes"] for name in ("ours", "line", "fewer"))
    assert 0 not in ours and ours != line and ours != fewer
    assert rows[found["cache"]]["evaluations"] == [3]


def test_other_scenes_are_told_in_the_words_of_training_and_are_no_scene_of_a_judge():
    held_out = scene_transformer.held_out("prompts")
    assert torch.equal(scene_transformer.prompt(0, 2, 1, 1), held_out[0])
    judge = judges.BENCHES["few"].make(4)
    others = [few_steps.scene(judge, index) for index in range(12)]
    palettes = {*map(_bytes, held_out[:, 0])}
    assert palettes.isdisjoint(_bytes(other.prompts[0, 0]) for other in others)
    assert len({_bytes(other.prompts) for other in others}) == 12
    assert len({other.seed for other in (judge, *others)}) == 12 + 1


def test_other_edits_take_their_colours_from_another_scene_than_the_judges():
    judge = judges.BENCHES["edit"].make(8)
    pairs = set()
    for index in range(12):
        edit = few_steps.scene(judge, index)
        of, other = (
            next(place for place in range(4) if torch.equal(all_of[place], one[0]))
            for all_of, one in zip(judge.references, edit.references, strict=True)
        )
        assert of != other
        assert torch.equal(edit.prompts[0], judge.prompts[of])
        pairs.add((of, other))
    assert len(pairs) == 12


def _bytes(tensor):
    return tensor.numpy().tobytes()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(scene_transformer, "LATENT_SIDE", 16)
    return judges.SceneJudge(steps=8, pictures=2)


def test_everything_that_saves_time_has_its_cost_and_the_plain_model_no_error(small):
    rows, shown = fidelity.judged(small, options.of_transformer(8))
    assert json.loads(json.dumps(rows)) == rows
    plain = rows[page.PLAIN]
    assert (plain["error"], plain["ssim"], plain["time"]) == (0, 1, 1)
    assert rows["5 steps"]["time"] == 5 / 8 == rows["forecast"]["time"]
    assert rows["5 steps"]["evaluations"] == rows["forecast"]["evaluations"] == 5
    attention = small.attention
    assert 0.1 < attention < 0.3
    assert rows["k,v 0.6, window 4x2"]["time"] == pytest.approx(1 - 0.6 * attention)
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


def row(kind, time, error, **others):
    figures = {"evaluations": 8, "ssim": 0.9, "kind": kind}
    return figures | {"time": time, "error": error} | others


def test_the_summary_takes_the_worst_number_of_steps():
    def merged(error):
        errors = {shares.TOMESD: 4, page.FAST_DEFAULT: error}
        return {name: row(shares.MERGING, 0.5, each) for name, each in errors.items()}

    # At 0.6, halfway between six and four steps, these have an error of 0.2.
    ours, steps = row(shares.OURS, 0.6, 0.1), {6: (0.8, 0.1), 4: (0.4, 0.3)}
    compared = {f"{number} steps": row(shares.STEPS, *point) for number, point in steps.items()}
    result = {
        "pictures": {"12": merged(1), "8": merged(3)},
        "second": {"8": {page.FAST: ours}},
        "image": {
            "20": compared | {"fast": ours},
            "8": compared | {"fast": ours | {"error": 0.05}},
        },
    }
    assert page.summary(result) == "summary: vs_fewer_steps_image=0.50 vs_tomesd_pictures=0.75"
    assert page.summary({}) == "summary:"
