"""Steps of transformers in which the model does not run, in the host's own samplers."""

import host
import pytest
import torch
from comfy.k_diffusion import sampling
from comfy.patcher_extension import WrappersMP
from comfy.samplers import sampler_object
from common import relative_error
from models.comfyui import TINY, sample

from benchmarks.fidelity import rivals
from tome_nodes.comfyui.attachment import _MADE_UP_FOR, _makes_up, attach, last_run
from tome_nodes.patching import forecast
from tome_nodes.patching.schedule import log_snr
from tome_nodes.report import drawing
from tome_nodes.report.pages import hint_for, in_words, report_of
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

FAST = settings_of("fast", {"ratio": 0.6})
SIZE = 8, 10


def configured(**others):
    return ToMeConfig(**{**FAST, "min_tokens": 1, **others})


def sampled(model, steps=8, kind="flux", **options):
    return sample(model, TINY[kind], SIZE, steps=steps, **options)


@pytest.fixture
def flux(models):
    return models("flux")


def seen(model):
    """The model, and what its evaluations got and gave: noise level, latent, denoised latent."""
    found = []

    def wrapper(executor, x, t, *args, **kwargs):
        denoised = executor(x, t, *args, **kwargs)
        found.append((float(t.max()), x.clone(), denoised.clone()))
        return denoised

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, str(id(found)), wrapper)
    return clone, found


def levels_of(evaluations):
    return {level for level, _, _ in evaluations}


@pytest.mark.parametrize("kind", ["flux", "wan21", "qwen_image", "ltxav", "z_image"])
def test_the_model_is_left_out_where_a_straight_line_takes_its_place(
    models, log_messages, monkeypatch, kind
):
    model = models(kind)
    patched, answers = seen(attach(model, configured()))
    monkeypatch.setattr(forecast._Part, "is_forecast_until", lambda part, step: False)
    found = sampled(patched, 6, kind)
    # The rival puts the line in place of the guided answer, which is the same as of both parts.
    expected = sampled(rivals.forecast()(model), 6, kind)
    assert relative_error(found, expected) < 1e-4
    assert len(levels_of(answers)) == 4
    assert log_messages()[-1] == "[ToMe] forecast 2/6 steps, ratio 0.60"
    assert relative_error(found, sampled(model, 6, kind)) > 1e-4


@pytest.mark.parametrize("kind", ["flux", "wan21", "ltxav"])
def test_the_step_after_a_forecast_makes_up_for_its_error(models, monkeypatch, kind):
    """In the arithmetic of the sampler, with the line between the answers around the forecast."""
    monkeypatch.setattr(forecast, "_RESPONSE", 0.0)
    outside, given = seen(models(kind))
    patched, answers = seen(attach(outside, configured()))
    sampled(patched, 6, kind, cfg=1.0)
    assert len(given) == 6 and len(answers) == 4
    answered = {level: denoised for level, _, denoised in answers}
    levels, latents = [each[0] for each in given], [each[1] for each in given]
    for step in (2, 4):
        before, now, after = (answered.get(level) for level in levels[step - 1 : step + 2])
        assert now is None
        logs = [log_snr(level, is_flow=True) for level in levels[step - 1 : step + 2]]
        between = torch.lerp(before, after, (logs[1] - logs[0]) / (logs[2] - logs[0]))
        if step == 4:
            # There is no step after the next.
            assert torch.equal(given[5][2], after)
            continue
        share, next_share = (levels[at + 1] / levels[at] for at in (step, step + 1))
        expected = torch.lerp(after, torch.lerp(between, latents[step], share), next_share)
        assert relative_error(latents[step + 2], expected) < 1e-4
        uncorrected = torch.lerp(after, latents[step + 1], next_share)
        assert relative_error(latents[step + 2], uncorrected) > 1e-3


@pytest.mark.newest_only
def test_the_samplers_that_make_up_for_forecasts_are_the_hosts():
    assert all(hasattr(sampling, name) for name in _MADE_UP_FOR)


def test_no_sampler_makes_up_for_forecasts_under_a_mask_that_moves():
    euler = sampler_object("euler")
    assert _makes_up(euler, {})
    assert not _makes_up(euler, {"denoise_mask_function": print})


@pytest.mark.parametrize(
    ("sampler", "is_changed"), [("uni_pc", False), ("deis", False), ("dpmpp_2m", True)]
)
def test_samplers_that_make_more_of_answers_get_them_as_they_are(flux, sampler, is_changed):
    outside, given = seen(flux)
    patched, answers = seen(attach(outside, configured()))
    # UniPC's is the only one that does not switch gradients off itself.
    with torch.no_grad():
        sampled(patched, 6, cfg=1.0, sampler=sampler)
    assert len(given) == 6 and len(answers) == 4
    found = {level: denoised for level, _, denoised in given}
    changed = [not torch.equal(found[level], denoised) for level, _, denoised in answers]
    assert any(changed) == is_changed


def test_a_run_too_short_to_forecast_is_the_plain_one(flux, log_messages):
    found = sampled(attach(flux, configured()), 3)
    assert torch.equal(found, sampled(flux, 3))
    assert log_messages() == [
        "[ToMe] nothing merged: a run of 3 steps or fewer is too short to forecast one of them; to "
        "save time, take fewer"
    ]


def test_without_forecasts_the_model_runs_in_each_step_and_merges(flux, log_messages):
    patched, answers = seen(attach(flux, configured(forecast=False)))
    sampled(patched)
    assert len(levels_of(answers)) == 8
    assert log_messages()[-1].startswith("[ToMe] merged ")


@pytest.mark.parametrize("preset", ["quality", "balanced", "fast"])
def test_these_presets_are_the_same(flux, log_messages, preset):
    config = ToMeConfig(**settings_of(preset, {"ratio": 0.6}) | {"min_tokens": 1})
    found = sampled(attach(flux, config))
    assert torch.equal(found, sampled(attach(flux, configured())))
    assert log_messages()[0] == "[ToMe] forecast 2/8 steps, ratio 0.60"


@pytest.mark.parametrize(
    ("sampler", "expected"), [("heun", 11), ("euler_ancestral", 6), ("res_multistep", 6)]
)
def test_other_samplers_leave_out_as_many_steps(flux, sampler, expected):
    patched, answers = seen(attach(flux, configured()))
    found = sampled(patched, cfg=1.0, sampler=sampler)
    assert len(answers) == expected
    plain = sampled(flux, cfg=1.0, sampler=sampler)
    assert 0 < relative_error(found, plain) < 1


def test_only_active_steps_are_left_out(flux):
    patched, answers = seen(attach(flux, configured(start_percent=0.6)))
    sampled(patched, cfg=1.0)
    plain, every = seen(flux)
    sampled(plain, cfg=1.0)
    assert 6 <= len(answers) < 8
    left_out = levels_of(every) - levels_of(answers)
    assert left_out and max(left_out) < every[3][0]


def test_a_run_of_a_picture_is_forecast_and_a_second_run_begins_anew(flux):
    patched, answers = seen(attach(flux, configured()))
    options = {"cfg": 1.0, "picture": 0.5, "start_step": 2}
    first = sampled(patched, **options)
    assert len(answers) == 4
    sampled(patched, cfg=1.0, seed=9)
    again = sampled(patched, **options)
    assert torch.equal(first, again)


def test_an_unet_merges_in_all_steps(sd15, log_messages):
    patched, answers = seen(attach(sd15, configured()))
    host.sample(patched, size=(16, 16), steps=6)
    assert len(levels_of(answers)) == 6
    assert log_messages()[-1].startswith("[ToMe] merged ")


def test_the_report_says_how_many_steps_were_forecast(flux):
    patched = attach(flux, configured(), wants_details=lambda: True)
    sampled(patched)
    run = last_run(patched)
    lines = in_words(run)
    assert lines[0] == "Forecast: 2 of 8 steps"
    assert not any(line.startswith(("Merged", "Nothing", "Steps: merged")) for line in lines)
    assert "Settings: ratio 0.60" in lines
    assert hint_for(run) is None
    for view in ("merge map", "chart"):
        page = report_of(run, view)
        assert page.text.splitlines() == lines
        # A square of 40 pixels for each step.
        squares = [tuple(page.picture[100, 50 + 40 * step].tolist()) for step in range(8)]
        forecast_steps = [step for step in range(8) if squares[step] == drawing.FAINT]
        assert forecast_steps == [3, 6]


def test_the_line_on_the_node_says_which_steps_were_forecast(flux):
    lines = []
    sampled(attach(flux, configured(), on_step=lines.append))
    forecast_steps = [step for step in range(8) if lines[step].startswith("forecast, step")]
    assert len(lines) == 8
    assert forecast_steps == [3, 6]


@pytest.mark.parametrize("preset", ["quality", "balanced", "fast"])
def test_a_ratio_of_0_is_the_plain_model(flux, preset):
    config = ToMeConfig(**settings_of(preset, {"ratio": 0.0}) | {"min_tokens": 1})
    patched, answers = seen(attach(flux, config))
    assert torch.equal(sampled(patched), sampled(flux))
    assert len(levels_of(answers)) == 8
