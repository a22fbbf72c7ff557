"""Steps without the model, in the host's own samplers."""

import gc
import math
import weakref
from dataclasses import replace

import comfy.samplers
import pytest
import torch
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_context_windows import ContextWindowsManualNode
from common import relative_error
from compatibility.neighbours import BY_NAME
from host import fast, preset
from models.comfyui import AURA_FLOW, TINY, build_class, conditioning, sample

from tome_nodes import reasons
from tome_nodes.comfyui import comfy_compiler, forecast_part
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.comfyui.guided_answers import place_in
from tome_nodes.report import drawing
from tome_nodes.report.pages import hint_for, in_words, report_of
from tome_nodes.skipping import forecasts
from tome_nodes.skipping.course import STRAIGHT
from tome_nodes.skipping.samplers import SAMPLERS
from tome_nodes.skipping.steps import log_snr

SIZE = 8, 10


def sampled(model, steps=8, kind="flux", **options):
    return sample(model, TINY[kind], SIZE, steps=steps, **options)


@pytest.fixture
def flux(models):
    return models("flux")


def seen(model, kind=WrappersMP.APPLY_MODEL):
    """The model, and what its evaluations got and gave: noise level, latent, denoised latent."""
    evaluations = []

    def wrapper(executor, x, t, *args, **kwargs):
        denoised = executor(x, t, *args, **kwargs)
        evaluations.append((float(t.max()), x.clone(), denoised.clone()))
        return denoised

    clone = model.clone()
    clone.add_wrapper_with_key(kind, str(id(evaluations)), wrapper)
    return clone, evaluations


def seen_by_sampler(model):
    """The same, of the guided answers that the sampler gets."""
    return seen(model, WrappersMP.PREDICT_NOISE)


def levels_of(evaluations):
    return {level for level, _, _ in evaluations}


@pytest.mark.parametrize(("sampler", "may_curve"), [("euler", True), ("euler_ancestral", False)])
def test_answers_may_go_along_curves_where_the_sampler_adds_no_noise(
    flux, monkeypatch, sampler, may_curve
):
    told, course_of = set(), forecasts.course_of

    def watched(step, *others):
        told.add(step.may_curve)
        return course_of(step, *others)

    monkeypatch.setattr(forecasts, "course_of", watched)
    sampled(attach(flux, fast()), 10, sampler=sampler)
    assert told == {may_curve}


def on_a_line(sound_turns, seen_levels):
    """A wrapper in place of LTX-2: answers on a line, but that the sound's may turn back on it."""

    def answer(executor, x, t, *args, **kwargs):
        seen_levels.append(float(t.max()))
        level = log_snr(seen_levels[-1], is_flow=True) + 5
        denoised = torch.full_like(x, level)
        sound = denoised[..., -math.prod(TINY["ltxav"].sound) :]
        sound.fill_(abs(level) if sound_turns else level)
        return denoised

    return answer


@pytest.mark.parametrize(
    ("sound_turns", "is_kept", "more"),
    [(False, False, set()), (True, False, {13}), (True, True, set())],
    ids=["both go on", "the sound turns", "a sound that the host keeps"],
)
def test_a_step_runs_where_the_sound_of_a_video_turns(models, sound_turns, is_kept, more):
    """The sound is so small a part of the latent that it changes next to nothing of it."""
    model, seen_levels = models("ltxav").clone(), []
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "line", on_a_line(sound_turns, seen_levels))
    mask = NestedTensor([torch.ones(1, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1)]) if is_kept else None
    sampled(attach(model, fast()), 20, "ltxav", noise_mask=mask)
    sampling = model.get_model_object("model_sampling")
    levels = comfy.samplers.calculate_sigmas(sampling, "simple", 20).tolist()
    running = {levels.index(level) for level in seen_levels}
    assert running == {0, 1, 2, 3, 4, 7, 9, 12, 14, 17, 18, 19} | more


@pytest.mark.newest_only
def test_the_samplers_that_hold_are_the_hosts():
    assert {*SAMPLERS} <= {*comfy.samplers.SAMPLER_NAMES}


@pytest.mark.parametrize(("sampler", "is_changed"), [("sa_solver", False), ("dpmpp_2m", True)])
def test_samplers_that_make_more_of_answers_get_them_as_they_are(flux, sampler, is_changed):
    outside, given = seen_by_sampler(flux)
    patched, answers = seen(attach(outside, fast()))
    sampled(patched, 8, cfg=1.0, sampler=sampler)
    assert len(given) == 8 and len(answers) < 8
    got = {level: denoised for level, _, denoised in given}
    changed = [not torch.equal(got[level], denoised) for level, _, denoised in answers]
    assert any(changed) == is_changed


@pytest.mark.parametrize(
    ("steps", "sampler", "why"),
    [
        (3, "deis", reasons.too_short(3, 4)),
        (4, "deis", reasons.sampler("deis")),
        (6, "dpmpp_2m", reasons.sampler_needs("dpmpp_2m", 8)),
        (8, "deis", reasons.sampler("deis")),
        (8, "uni_pc", reasons.sampler("uni_pc")),
        (8, "dpmpp_2m_sde", reasons.sampler("dpmpp_2m_sde")),
        (8, "heun", reasons.sampler("heun")),
        (8, "euler_cfg_pp", reasons.sampler("euler_cfg_pp")),
    ],
)
def test_a_run_that_cannot_be_forecast_is_the_plain_one(flux, log_messages, steps, sampler, why):
    result = sampled(attach(flux, fast()), steps, sampler=sampler)
    assert torch.equal(result, sampled(flux, steps, sampler=sampler))
    assert log_messages() == [f"[ToMe] nothing was forecast: {why}"]


@pytest.mark.parametrize("sampler", ["heun", "seeds_2"])
def test_a_run_shows_what_a_sampler_does_whatever_its_name(
    flux, log_messages, monkeypatch, sampler
):
    monkeypatch.setattr(forecast_part, "SAMPLERS", {sampler: SAMPLERS["euler"]})
    result = sampled(attach(flux, fast()), sampler=sampler)
    assert torch.equal(result, sampled(flux, sampler=sampler))
    assert log_messages() == [f"[ToMe] nothing was forecast: {reasons.SEVERAL}"]


def test_a_sampler_within_another_counts(flux, log_messages):
    def sample_wrapping(model, x, sigmas, inner, **options):
        return inner.sampler_function(model, x, sigmas, **options)

    for name, expected in (("euler", "forecast 2/8 steps"), ("heun", "under the sampler heun")):
        inner = comfy.samplers.sampler_object(name)
        outer = comfy.samplers.KSAMPLER(sample_wrapping, {"inner": inner})
        guided(attach(flux, fast()), sampler=outer)
        assert expected in log_messages()[-1]


def guided(
    model,
    steps=8,
    sampler=None,
    sigmas=None,
    callback=None,
    latent=None,
    guider=comfy.samplers.CFGGuider,
    **options,
):
    """What a guider samples, as ComfyUI's custom sampler has it."""
    tiny = TINY["flux"]
    guider = guider(model)
    guider.set_conds(conditioning(tiny, 5), conditioning(tiny, 6))
    guider.set_cfg(4.0)
    latent = torch.zeros(1, tiny.channels, *SIZE) if latent is None else latent
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    sigmas = torch.linspace(1, 0, steps + 1) if sigmas is None else sigmas
    sampler = sampler or comfy.samplers.sampler_object("euler")
    return guider.sample(noise, latent, sampler, sigmas, callback=callback, **options)


@pytest.mark.parametrize(
    ("sampler", "steps", "is_forecast"),
    [("euler", 12, True), ("er_sde", 12, False), ("er_sde", 16, True)],
)
def test_only_some_samplers_take_noise_levels_that_count_as_one(
    flux, log_messages, sampler, steps, is_forecast
):
    levels = torch.cat([torch.tensor([1.0, 0.999]), torch.linspace(0.95, 0, steps - 1)])
    guided(attach(flux, fast()), sampler=comfy.samplers.sampler_object(sampler), sigmas=levels)
    assert ("fall too unevenly" not in log_messages()[-1]) == is_forecast


@pytest.mark.parametrize(("first", "is_forecast"), [(1.0, True), (0.975, False), (0.93, True)])
def test_no_run_is_forecast_that_takes_over_just_below_the_highest_noise(
    flux, log_messages, first, is_forecast
):
    """As the second half of linear_quadratic, whose first half is noise alone."""
    latent = torch.ones(1, TINY["flux"].channels, *SIZE)
    guided(attach(flux, fast()), sigmas=torch.linspace(first, 0, 9), latent=latent)
    assert (str(reasons.TAKES_OVER) not in log_messages()[-1]) == is_forecast


def test_the_callback_of_the_host_is_called_as_without(flux):
    seen_steps = []
    guided(attach(flux, fast()), callback=lambda step, *_: seen_steps.append(step))
    assert seen_steps == [*range(8)]


def moving_windows(model):
    inputs = (4, 2, "standard_uniform", 1, False, "pyramid", 2, False)
    return ContextWindowsManualNode.execute(model, *inputs).args[0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("moving windows", reasons.CHANGES),
        ("ContextWindowsManual", None),
        ("DifferentialDiffusion", reasons.MOVING_MASK),
        ("EasyCache", reasons.CACHE),
        ("LazyCache", reasons.CACHE),
        ("APG", reasons.MOMENTUM),
        ("CFGZeroStar", None),
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_beside_some_nodes_nothing_is_forecast(flux, log_messages, name, why, is_last):
    def patch(model):
        return BY_NAME[name].patch(model, "flux") if name in BY_NAME else moving_windows(model)

    ours = attach(flux, fast())
    result = sampled(patch(ours) if is_last else attach(patch(flux), fast()))
    assert torch.equal(result, sampled(patch(flux))) == (why is not None)
    expected = "forecast 3/8 steps (3, 5, 7)" if why is None else f"nothing was forecast: {why}"
    assert log_messages() == [f"[ToMe] {expected}"]


@pytest.mark.parametrize("kind", ["flux", "wan21"])
def test_guidance_is_that_of_the_step_in_steps_that_are_forecast(models, kind):
    """Another node may take a scale from a list, or do something else from some step on."""
    model, given, scales = models(kind).clone(), [], iter(range(1, 20))

    def guide(parts):
        scale = next(scales)
        given.append((scale, parts["cond"].clone(), parts["uncond"].clone()))
        return parts["uncond"] + scale * (parts["cond"] - parts["uncond"])

    model.set_model_sampler_cfg_function(guide)
    patched, guided_answers = seen_by_sampler(attach(model, fast()))
    patched, answers = seen(patched)
    sampled(patched, kind=kind, scheduler="normal")
    errors = {}
    for (scale, cond, uncond), (level, latent, denoised) in zip(given, guided_answers, strict=True):
        expected = latent - (uncond + scale * (cond - uncond))
        errors[level] = relative_error(denoised, expected)
    are_forecast = errors.keys() - levels_of(answers)
    assert are_forecast and max(errors[level] for level in are_forecast) < 1e-5


@pytest.mark.parametrize("kind", ["flux", "wan21"])
def test_guidance_that_is_no_scale_is_forecast_as_a_whole(models, kind, monkeypatch):
    """What the sampler gets is on the line of guided answers, whatever guidance makes of parts."""

    def guide(given):
        cond, uncond = given["cond_denoised"], given["uncond_denoised"]
        return given["denoised"] * (cond.norm() / uncond.norm()) + (given["input"] - cond).square()

    monkeypatch.setattr(forecasts, "course_of", lambda *_: STRAIGHT)
    model = models(kind).clone()
    model.set_model_sampler_post_cfg_function(guide)
    patched, answers = seen(attach(model, fast()))
    patched, guided_answers = seen_by_sampler(patched)
    sampled(patched, kind=kind, scheduler="normal")
    levels = [level for level, _, _ in guided_answers]
    at = next(index for index, level in enumerate(levels) if level not in levels_of(answers))
    first, last, forecast = (denoised for *_, denoised in guided_answers[at - 2 : at + 1])
    changes = [(later - last).flatten() for later in (2 * last - first, forecast)]
    assert torch.cosine_similarity(*changes, dim=0) > 0.99


def test_a_step_whose_scale_jumps_beside_a_call_that_is_new_is_no_error(flux):
    """Only some of its calls were forecast."""

    class Apart(comfy.samplers.CFGGuider):
        def predict_noise(self, x, timestep, model_options={}, seed=None):  # noqa: B006
            is_new = 0.4 < float(timestep.max()) < 0.6
            names = "positive", "positive" if is_new else "negative"
            one, other = (
                comfy.samplers.calc_cond_batch(
                    *(self.inner_model, [self.conds[name]], x, timestep, model_options)
                )[0]
                for name in names
            )
            return torch.lerp(other, one, 9.0 if is_new else 2.0)

    assert guided(attach(flux, fast()), guider=Apart).isfinite().all()


class Momentum:
    """Guidance that adds what it keeps from step to step."""

    average = 0.0

    def __init__(self, in_place=False):
        self.in_place = in_place

    def __call__(self, parts):
        self.average = parts["cond"] - parts["uncond"] - 0.5 * self.average
        guided = parts["uncond"] + 4 * self.average
        if self.in_place:
            parts["uncond_denoised"].copy_(parts["input"] - guided)
        return guided


def with_guidance(model, guidance):
    model = model.clone()
    model.set_model_sampler_cfg_function(guidance)
    return model


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("has_windows", [False, True])
def test_momentum_is_seen_whatever_keeps_it(flux, log_messages, in_place, has_windows):
    model = windowed(flux) if has_windows else flux
    result = sampled(attach(with_guidance(model, Momentum(in_place)), fast()))
    assert torch.equal(result, sampled(with_guidance(model, Momentum(in_place))))
    assert log_messages() == [f"[ToMe] nothing was forecast: {reasons.MOMENTUM}"]


def test_what_guidance_gets_in_parts_after_the_other_answers_is_no_momentum(flux, log_messages):
    """Such as a blurred answer, which may look like those of the step before."""
    before = []

    def guide(args):
        comfy.samplers.calc_cond_batch(
            *(args["model"], [args["uncond"]], args["input"], args["sigma"], args["model_options"])
        )
        blurred = before[-1] if before else args["cond_denoised"]
        before.append(args["cond_denoised"].clone())
        return args["denoised"] + 2 * (args["cond_denoised"] - blurred)

    model = windowed(flux)
    model.set_model_sampler_post_cfg_function(guide)
    sampled(attach(model, fast()))
    assert log_messages()[-1].startswith("[ToMe] forecast")


def test_a_guider_that_guides_in_tiles_is_sampled_as_without_us(flux):
    """What it guides has another shape than the latent."""

    class Tiles(comfy.samplers.CFGGuider):
        def predict_noise(self, x, timestep, model_options=None, seed=None):
            halves = [
                super(Tiles, self).predict_noise(half, timestep, model_options, seed)
                for half in x.chunk(2, -1)
            ]
            return torch.cat(halves, -1)

    patched = attach(flux, fast())
    assert guided(patched, guider=Tiles).isfinite().all()
    assert last_run(patched).counts.forecast_steps


def test_what_looks_at_answers_before_guidance_is_gone_after_a_run(flux):
    left = []

    def outside(executor, *args, **kwargs):
        result = executor(*args, **kwargs)
        left.append(executor.class_obj.model_options.get("sampler_pre_cfg_function"))
        return result

    def unchanged(given):
        return given["conds_out"]

    model = flux.clone()
    model.add_wrapper(WrappersMP.OUTER_SAMPLE, outside)
    sampled(attach(model, fast()))
    model.set_model_sampler_pre_cfg_function(unchanged)
    sampled(attach(model, fast()))
    assert left == [None, [unchanged]]


def windowed(model, begin_of=lambda: 0):
    """A model whose answers come in parts of the latent, the first of which may move."""

    def windows(executor, model, conds, x, timestep, options):
        begin = begin_of()
        sums, counts = [torch.zeros_like(x) for _ in conds], torch.zeros_like(x)
        for start in (begin, 5):
            place = ..., slice(start, start + 5)
            for whole, part in zip(
                sums, executor(model, conds, x[place], timestep, options), strict=True
            ):
                whole[place] += part
            counts[place] += 1
        return [whole / counts.clamp(min=1) for whole in sums]

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "windows", windows)
    return clone


@pytest.mark.parametrize(("shift", "is_forecast"), [(0, True), (1, False)])
def test_windows_that_another_node_makes_may_stay_but_not_move(
    flux, log_messages, shift, is_forecast
):
    """Whichever dimension they are of, and whatever the node is called."""
    model = windowed(flux, lambda: shift * len(levels_of(answers)) % 3)
    patched, answers = seen(attach(model, fast()))
    sampled(patched)
    assert (len(levels_of(answers)) < 8) == is_forecast
    assert (str(reasons.CHANGES) in log_messages()[-1]) != is_forecast


@pytest.mark.parametrize(
    # Earlier ComfyUIs cut no windows of a latent with sound.
    "kind",
    ["wan21", pytest.param("ltxav", marks=pytest.mark.newest_only)],
)
def test_context_windows_of_frames_that_stay_are_forecast(models, log_messages, kind):
    """Of a video with sound, the latent is one row of numbers."""
    tiny = replace(TINY[kind], frames=12)
    model = ContextWindowsManualNode.execute(
        *(models(kind), 8, 4, "standard_static", 1, False, "pyramid", 2, False)
    ).args[0]
    assert sample(attach(model, fast()), tiny, SIZE, steps=8).isfinite().all()
    assert log_messages()[-1].startswith("[ToMe] forecast")


def test_the_place_of_a_part_is_told_from_others():
    whole = torch.randn(1, 4, 6, 8, 8, generator=torch.Generator().manual_seed(1))
    windows = [0, 1, 2], [1, 2, 3], [5, 0, 1], [0, 2, 4]
    places = [place_in(whole[:, :, window], whole) for window in windows]
    assert len({*places}) == 4
    assert places == [place_in(whole[:, :, window], whole.clone()) for window in windows]
    row = whole.flatten(1)[:, None]
    assert place_in(row[..., 64:512], row) == place_in(row[..., 64:512], row)
    assert place_in(row[..., 64:512], row) != place_in(row[..., 128:576], row)
    assert place_in(whole, whole) is None
    # Of another picture, or of one column, each is like no other.
    for part in 1 + whole[:, :, :3], whole[..., :1]:
        assert place_in(part, whole) != place_in(part, whole)


def test_noise_that_a_sampler_adds_on_top_is_left_alone(flux, log_messages):
    churning = comfy.samplers.ksampler("euler", {"s_churn": 2.0})
    guided(attach(flux, fast()), sampler=churning)
    expected = reasons.sampler("euler with s_churn")
    assert log_messages() == [f"[ToMe] nothing was forecast: {expected}"]


@pytest.mark.parametrize("is_last", [False, True])
def test_other_nodes_see_forecasts_as_answers_whatever_the_order(flux, is_last):
    """Ours is the innermost of the wrappers of a guided answer."""
    guided_answers = []

    def wrapper(executor, x, *args, **kwargs):
        answer = executor(x, *args, **kwargs)
        guided_answers.append(answer)
        return answer

    def add(model):
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "other", wrapper)
        return clone

    patched = add(attach(flux, fast())) if is_last else attach(add(flux), fast())
    patched, answers = seen(patched)
    sampled(patched)
    assert len(guided_answers) == 8 and len(levels_of(answers)) == 5


@pytest.mark.parametrize("short", [False, True])
def test_prompts_of_two_calls_are_forecast_together(flux, monkeypatch, short):
    """They are where memory is short, or where their lengths differ."""
    tiny = TINY["flux"]
    expected = sampled(attach(flux, fast()))
    prompts = conditioning(tiny, 5), conditioning(tiny, 6, tokens=12 if short else 20)
    if not short:
        monkeypatch.setattr(type(flux), "get_free_memory", lambda *_: 0)
    patched, answers = seen(attach(flux, fast()))
    result = sampled(patched, prompts=prompts)
    assert len(answers) == 2 * 5 and len(levels_of(answers)) == 5
    assert short or relative_error(result, expected) < 1e-5


def test_a_model_without_a_record_is_forecast(log_messages):
    model = build_class("AuraFlow", AURA_FLOW.settings)
    assert sample(attach(model, fast()), AURA_FLOW, steps=8).isfinite().all()
    assert log_messages() == ["[ToMe] forecast 3/8 steps (3, 5, 7)"]


def test_the_hosts_compiler_stays_on_where_steps_are_forecast(flux, monkeypatch):
    def fail(options):
        raise AssertionError("it was switched off")

    monkeypatch.setattr(comfy_compiler, "switched_off", fail)
    sampled(attach(flux, fast()))
    with pytest.raises(AssertionError, match="switched off"):
        sampled(attach(flux, fast(forecast=False, attn_tokens="k,v")))


def test_nothing_is_kept_of_a_run(flux, monkeypatch):
    """Even if another node goes on holding a copy of the options."""
    kept, alive, held, differences = [], [], [], []
    observe, note_guided = forecasts.Forecasts.observe, forecasts.Forecasts.note_guided

    def watched(self, denoised, call=0):
        answer = observe(self, denoised, call)
        (line,) = self._lines.values()
        kept.extend(weakref.ref(known.denoised) for known in line.answers)
        alive.append(len({id(latent()) for latent in kept if latent() is not None}))
        return answer

    def noted(self, denoised, guidance):
        differences.append(weakref.ref(guidance.difference))
        return note_guided(self, denoised, guidance)

    def holding(executor, x, timestep, options, *args):
        held.append(options)
        kept.append(weakref.ref(x))
        return executor(x, timestep, options, *args)

    monkeypatch.setattr(forecasts.Forecasts, "observe", watched)
    monkeypatch.setattr(forecasts.Forecasts, "note_guided", noted)
    model = flux.clone()
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "other", holding)
    patched = attach(model, fast())
    options = patched.model_options["transformer_options"]
    sampled(patched)
    gc.collect()
    assert len(held) == 8 and kept and max(alive) <= 4
    assert differences and not any(latent() is not None for latent in kept + differences)
    assert WrappersMP.CALC_COND_BATCH not in options.get("wrappers", {})


def test_balanced_is_the_same_as_fast(flux, log_messages):
    result = sampled(attach(flux, preset("balanced")))
    assert torch.equal(result, sampled(attach(flux, fast())))
    assert log_messages()[0] == "[ToMe] forecast 3/8 steps (3, 5, 7)"


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m", "res_multistep"])
def test_other_samplers_leave_out_as_many_steps(flux, sampler):
    patched, answers = seen(attach(flux, fast()))
    forecast, plain = (sampled(model, cfg=1.0, sampler=sampler) for model in (patched, flux))
    assert len(answers) == 5
    assert 0 < relative_error(forecast, plain) < 1


def test_a_run_of_a_picture_is_forecast_and_a_second_run_begins_anew(flux):
    patched, answers = seen(attach(flux, fast()))
    options = {"cfg": 1.0, "picture": 0.5, "start_step": 2}
    first = sampled(patched, **options)
    assert len(answers) == 4
    sampled(patched, cfg=1.0, seed=9)
    assert torch.equal(sampled(patched, **options), first)


def test_the_report_says_how_many_steps_were_forecast(flux):
    patched = attach(flux, fast(), wants_details=lambda: True)
    sampled(patched)
    run = last_run(patched)
    lines = in_words(run)
    assert lines[0] == "Done: forecast 3 of 8 steps"
    assert not any(line.startswith(("Nothing", "Tokens", "Steps: merged")) for line in lines)
    assert "Settings: ratio 0.60" in lines
    assert hint_for(run) is None
    for view in ("merge map", "chart"):
        page = report_of(run, view)
        assert page.text.splitlines() == lines
        # A square of 40 pixels for each step, above a line of words.
        squares = [tuple(page.picture[-70, 40 + 40 * step].tolist()) for step in range(8)]
        forecast_steps = [step for step in range(8) if squares[step] == drawing.FAINT]
        assert forecast_steps == [2, 4, 6]


def test_the_line_on_the_node_says_which_steps_were_forecast(flux):
    lines = []
    sampled(attach(flux, fast(), on_step=lines.append))
    forecast_steps = [step for step in range(8) if lines[step].startswith("forecast, step")]
    assert len(lines) == 8
    assert forecast_steps == [2, 4, 6]
