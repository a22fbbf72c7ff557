"""ToMe Tune on real models: what it measures, what it takes, and what it keeps."""

import json
from dataclasses import replace
from functools import partial

import comfy.model_management
import pytest
import torch
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrappersMP
from comfy_extras import nodes_easycache
from common import FakeClock
from host import conditioning, overridden, sample
from models import comfyui as tiny_models
from models.comfyui import TINY, build

from tome_nodes.comfyui.attachment import KEY, attach, is_attached, last_run
from tome_nodes.comfyui.tune import trials, tune_cache
from tome_nodes.comfyui.tune.trials import BOTH, EASY_CACHE, Sampling, Trials
from tome_nodes.comfyui.tune.tuner import tune
from tome_nodes.report import pages
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of
from tome_nodes.tuning.search import BALANCED, FAST, Candidate, Measured, Wish

SPEEDS = {
    "balanced": dict(zip((0.3, 0.45, 0.6, 0.75, 0.85), (1.05, 1.1, 1.25, 1.4, 1.5), strict=True)),
    "fast": dict(zip((0.3, 0.4, 0.5, 0.6, 0.7), (1.25, 1.5, 2.0, 2.5, 3.0), strict=True)),
}
"""Times as fast as the unpatched model, on merged tokens."""


RUN = {
    "seed": 1,
    "steps": 8,
    "cfg": 1.0,
    "sampler_name": "euler",
    "scheduler": "normal",
    "denoise": 1.0,
}


WISH = Wish("speed", 1.2)

pytestmark = pytest.mark.usefixtures("user_folder")


def speed_of(config, is_full):
    preset = "fast" if config.scope == "stack" else "balanced"
    return 1.0 if is_full else SPEEDS[preset][config.ratio]


@pytest.fixture
def timed(models):
    """A model whose evaluations take the time that a test wants, its clock, and their settings."""
    return with_clock(models("flux").clone())


@pytest.fixture
def timed_unet(sd15):
    """The same of a UNet."""
    return with_clock(sd15.clone())


def before_evaluations(model, do):
    """Call a function before each evaluation: with the settings if it merges, and its noise."""

    def wrapper(executor, *args, **kwargs):
        run = args[5].get(KEY)
        do(None if run is None else run._config, args[1], args[5]["sample_sigmas"])
        return executor(*args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", wrapper)


def with_clock(model):
    clock, seen = FakeClock(), []

    def spend(config, noise, levels):
        # Every fourth step, counted back from the last but one.
        full = levels.flip(0)[2::4]
        is_full = config is not None and config.scope == "stack" and noise.max() in full
        clock.time += 1.0 if config is None else 1 / clock.speed(config, is_full)
        seen.append(config)

    clock.speed = speed_of
    before_evaluations(model, spend)
    return model, clock, seen


def sampling(kind="flux", size=(32, 32), **others):
    tiny = TINY[kind]
    return Sampling(
        **{
            "positive": tiny_models.conditioning(tiny, 5),
            "negative": tiny_models.conditioning(tiny, 6),
            "latent_image": {"samples": torch.zeros(1, tiny.channels, *size)},
            **RUN,
            **others,
        }
    )


def sampling_of_unet(**others):
    return sampling(
        positive=conditioning(0.5),
        negative=conditioning(0.25),
        latent_image={"samples": torch.zeros(1, 4, 16, 16)},
        **others,
    )


def tuned(timed, wish=WISH, run=None, measure_again=False, **others):
    model, clock, _ = timed
    return tune(
        model,
        run or sampling(**others),
        wish,
        make_trials=partial(Trials, clock=clock),
        measure_again=measure_again,
    )


def change(sampled, plain):
    """The root mean square of the difference of two latents, in standard deviations."""
    sampled, plain = sampled.double(), plain.double()
    return ((sampled - plain).square().mean().sqrt() / plain.std()).item()


def test_a_known_front_is_found(timed):
    model, _, seen = timed
    found = tuned(timed)
    assert found.candidate == Candidate("balanced", 0.6)
    assert found.measured.unpatched == 1.0
    assert found.measured.speed == pytest.approx(1.25)
    assert found.measured.change > 0
    assert found.runs == len(seen) / 8
    assert not is_attached(model) and overridden(model) == []


def test_steps_on_all_tokens_count_at_their_share(timed):
    """*fast* runs five of twenty steps on all tokens."""
    model, clock, _ = timed
    measured = Trials(model, sampling(steps=20), clock=clock).measure(Candidate("fast", 0.5))
    assert measured.seconds == pytest.approx(5 / 20 * 1.0 + 15 / 20 * 0.5)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("candidate", [BALANCED[2], FAST[2]], ids=str)
def test_evaluations_that_compile_do_not_count(timed, candidate, steps):
    model, clock, _ = timed
    expected = Trials(model, sampling(steps=steps), clock=clock).measure(candidate)
    before, compiled = clock.speed, set()

    def slow_at_first(config, is_full):
        is_new = is_full not in compiled
        compiled.add(is_full)
        return before(config, is_full) / (50 if is_new else 1)

    clock.speed = slow_at_first
    measured = Trials(model, sampling(steps=steps), clock=clock).measure(candidate)
    assert len(compiled) > 0
    assert measured.seconds == pytest.approx(expected.seconds)


@pytest.mark.parametrize(
    ("candidate", "sampler"),
    [(BALANCED[3], "dpmpp_2m"), (FAST[2], "euler_ancestral"), (BALANCED[3], "heun")],
    ids=str,
)
def test_the_change_is_that_of_the_samplers_own_pictures(sd15, candidate, sampler):
    """Against the host's sampling without any of this code."""
    run = sampling_of_unet(steps=2, sampler_name=sampler, scheduler="karras")
    state = torch.get_rng_state()
    measured = Trials(sd15, run).measure(candidate)
    assert torch.equal(torch.get_rng_state(), state)
    config = ToMeConfig(**settings_of(candidate.preset, {"ratio": candidate.ratio}))
    plain, patched = (
        sample(model, (16, 16), cfg=1.0, sampler=sampler, scheduler="karras")
        for model in (sd15, attach(sd15, config))
    )
    assert measured.change == pytest.approx(change(patched, plain), rel=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 4, 20])
def test_what_trials_take_is_counted_and_kept(timed, steps):
    found = tuned(timed, Wish("speed", 1.3), steps=steps)
    assert 0 < found.runs <= 9 or steps == 1
    again = tuned(timed, Wish("speed", 1.3), steps=steps, seed=2)
    assert found.runs == len(timed[2]) / steps
    assert again.runs == 0 and again.date
    assert (again.candidate, again.figures) == (found.candidate, found.figures)
    assert again.instead == found.instead


def test_fewer_steps_take_no_longer_than_what_is_found(timed):
    """As fast as the settings, at 4 of 5 steps; their change is that of the host's sampling."""
    model, *_ = timed
    found = tuned(timed, steps=5)
    assert found.measured.speed == pytest.approx(1.25)
    fewer = found.instead["4 of 5 steps"]
    assert fewer.speed == pytest.approx(1.25)
    plain, short = (
        tiny_models.sample(model, TINY["flux"], (32, 32), steps=steps, cfg=1.0, scheduler="normal")
        for steps in (5, 4)
    )
    assert fewer.change == pytest.approx(change(short, plain), rel=1e-3)


def test_one_step_cannot_be_fewer(timed):
    model, clock, _ = timed
    found = Trials(model, sampling(steps=1), clock=clock).instead(BALANCED[2], 1.2)
    assert [*found] == [EASY_CACHE]


def test_the_hosts_cache_is_tried_alone_and_with_the_settings(models, monkeypatch):
    """With a threshold so high that it skips most evaluations of this model."""
    monkeypatch.setattr(trials, "EASY_CACHE_DEFAULTS", (3.0, 0.0, 1.0, False))
    model, clock = models("flux"), FakeClock()

    def spend(*_):
        clock.time += 1.0

    hook = model.model.diffusion_model.img_in.register_forward_pre_hook(spend)
    with hook:
        found = Trials(model, sampling(), clock=clock).instead(BALANCED[2], 1.2)
    assert found[EASY_CACHE].speed > 1.5 and found[EASY_CACHE].change > 0
    assert found[BOTH].speed > 1.5 and found[BOTH].change != found[EASY_CACHE].change
    assert "easycache" not in model.model_options["transformer_options"]


def test_a_cache_that_skips_nothing_is_not_tried_with_the_settings(timed):
    found = tuned(timed, steps=4)
    assert found.instead[EASY_CACHE].change == 0
    assert BOTH not in found.instead


def test_a_model_with_a_cache_is_tried_with_it_alone(timed):
    model, clock, seen = timed
    (cached,) = nodes_easycache.EasyCacheNode.execute(model, 0.2, 0.15, 0.95, False).args
    found = tuned((cached, clock, seen))
    assert EASY_CACHE not in found.instead


def test_a_picture_to_start_from_has_its_own_steps_on_all_tokens(timed):
    latent = {"samples": torch.ones(1, 16, 32, 32), "noise_mask": torch.ones(1, 32, 32)}
    found = tuned(timed, Wish("speed", 1.4), latent_image=latent, denoise=0.5, steps=8)
    assert found.candidate is not None


def test_the_model_that_comes_in_may_merge_already(timed):
    """It is the same kind of model."""
    model, clock, seen = timed
    patched = attach(model, ToMeConfig(**settings_of("fast", {"ratio": 0.7})))
    found = tuned((patched, clock, seen))
    assert found.measured.unpatched == 1.0
    assert last_run(patched) is None
    assert tuned(timed).runs == 0


def test_the_log_and_the_report_of_a_run_end_with_what_was_measured(sd15, log_messages):
    config = ToMeConfig(**settings_of("balanced", {"ratio": 0.5}))
    patched = attach(sd15, config, tuned=Measured(0.041, 0.25, 0.1))
    sample(patched, (16, 16))
    assert log_messages()[-1].endswith(
        ", window, 6.10 times as fast: 41 ms a step, 0.25 s unpatched"
    )
    assert (
        "Helped: 6.10 times as fast: 41 ms a step, 0.25 s unpatched (ToMe Tune)"
        in pages.in_words(last_run(patched))
    )
    sample(attach(sd15, config), (16, 16))
    assert log_messages()[-1].endswith(", window")


@pytest.mark.parametrize("wish", [Wish("speed", 1.0), Wish("likeness", 0.0)])
def test_a_wish_that_the_unpatched_model_fulfils_costs_nothing(timed, wish):
    found = tuned(timed, wish)
    assert found.candidate is None
    assert timed[2] == []


def test_a_run_too_short_to_forecast_is_compared_with_fewer_steps(timed):
    found = tuned(timed, steps=3)
    assert found.candidate is None
    assert found.instead["2 of 3 steps"].speed == pytest.approx(1.5)
    assert found.instead["2 of 3 steps"].change > 0
    assert BOTH not in found.instead
    again = tuned(timed, steps=3)
    assert (again.runs, again.instead) == (0, found.instead)
    # Another wish is compared with the steps that fulfil it.
    faster = tuned(timed, Wish("speed", 2.0), steps=3)
    assert [*faster.instead] == ["1 of 3 steps", EASY_CACHE]
    assert tuned(timed, steps=3).runs == 0
    assert {measured.obstacle for measured in found.figures.values()} == {
        "a run of 3 steps or fewer is too short to forecast one of them; to save time, take fewer"
    }


def test_a_model_that_cannot_merge_stays_as_it_is():
    other = build(TINY["flux"])
    other.model.diffusion_model = torch.nn.Linear(1, 1)
    found = tune(other, sampling(), WISH)
    assert found.candidate is None
    assert found.obstacle.startswith("token merging")


@pytest.mark.parametrize(("kind", "size"), [("wan21", (3, 32, 32)), ("ltxav", (2, 16, 16))])
def test_videos_with_and_without_sound(models, kind, size):
    tiny = TINY[kind]
    latent = torch.zeros(1, tiny.channels, *size)
    if tiny.sound is not None:
        latent = NestedTensor([latent, torch.zeros(1, *tiny.sound)])
    run = sampling(kind, steps=4, latent_image={"samples": latent}, cfg=3.0)
    measured = Trials(models(kind), run).measure(BALANCED[2])
    assert measured.obstacle is None and measured.change > 0


def test_a_node_that_answers_in_place_of_the_model_is_said(models):
    model = models("flux").clone()
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "theirs", lambda _, x, *args: 0.5 * x)
    found = tune(model, sampling(steps=2), WISH)
    assert {measured.obstacle for measured in found.figures.values()} == {"nothing was evaluated"}
    assert found.candidate is None


@pytest.mark.parametrize("denoise", [0.0, 1e-9])
def test_nothing_to_sample_is_said(timed, denoise):
    found = tuned(timed, denoise=denoise)
    assert found.obstacle == f"with denoise {denoise:g} there is nothing to sample"
    assert timed[2] == []


def test_a_trial_that_fails_leaves_the_others(timed_unet, log_messages):
    model, *_ = timed_unet

    def fail(config, *_):
        if config is not None and config.scope == "stack":
            raise ValueError("no room")

    before_evaluations(model, fail)
    # It need not come again.
    for _ in range(2):
        found = tuned(timed_unet, Wish("speed", 1.35), run=sampling_of_unet())
        assert found.candidate == Candidate("balanced", 0.75)
        assert found.runs > 0
    assert "[ToMe] fast, ratio 0.50: ValueError: no room" in log_messages()


def test_the_presets_are_one_ladder_in_a_transformer_and_two_in_a_unet(timed, timed_unet):
    wish = Wish("speed", 1.35)
    found = tuned(timed_unet, wish, run=sampling_of_unet())
    assert {candidate.preset for candidate in found.figures} == {"balanced", "fast"}
    assert {candidate.preset for candidate in tuned(timed, wish).figures} == {"balanced"}


def test_an_answer_that_is_not_finite_is_a_failure(timed):
    model, *_ = timed

    def spoil(executor, *args, **kwargs):
        run = args[5].get(KEY)
        return executor(*args, **kwargs) * (1 if run is None else float("nan"))

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "spoil", spoil)
    found = tuned(timed, Wish("speed", 1.35))
    assert found.candidate is None
    assert all(measured.has_failed for measured in found.figures.values())
    assert pages.tuning_page(found).text.startswith("Unpatched: ")


def test_what_is_done_once_in_a_run_counts_for_neither(timed):
    """As a ControlNet encodes its picture."""
    model, clock, _ = timed

    def prepare(executor, *args, **kwargs):
        clock.is_prepared = False
        return executor(*args, **kwargs)

    def spend(*_):
        clock.time += 0.0 if clock.is_prepared else 7.0
        clock.is_prepared = True

    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "prepare", prepare)
    before_evaluations(model, spend)
    here, candidate = Trials(model, sampling(), clock=clock), Candidate("balanced", 0.6)
    measured = here.measure(candidate)
    assert (measured.unpatched, measured.speed) == pytest.approx((1.0, 1.25))
    for fewer in 1, 2:
        instead = here.instead(candidate, 8 / fewer)
        assert instead[f"{fewer} of 8 steps"].speed == pytest.approx(8 / fewer)


def test_tensors_among_the_options_of_other_nodes(timed):
    model, *_ = timed
    model.model_options["transformer_options"]["audio"] = torch.zeros(2, 3)
    assert tuned(timed).candidate is not None


def test_an_interrupt_ends_the_trials_and_leaves_nothing(timed, user_folder):
    model, _, seen = timed
    interrupted = comfy.model_management.InterruptProcessingException

    def interrupt(*_):
        if len(seen) == 9:
            comfy.model_management.interrupt_current_processing()

    before_evaluations(model, interrupt)
    with pytest.raises(interrupted):
        tuned(timed)
    assert overridden(model) == []
    assert not tune_cache.FILE.path.exists()
    assert len(seen) == 9


def test_another_wish_goes_on_from_what_is_kept(timed):
    first = tuned(timed)
    second = tuned(timed, Wish("speed", 1.4))
    assert second.figures.items() > first.figures.items()
    again = tuned(timed)
    assert (again.candidate, again.runs) == (first.candidate, 0)


@pytest.mark.parametrize(
    "other",
    [
        *({"size": (32, 40)}, {"steps": 6}, {"cfg": 3.0}, {"measure_again": True}),
        *({"denoise": 0.6}, {"sampler_name": "heun"}, {"scheduler": "karras"}),
        {"positive": [[torch.zeros(1, 30, 32), {"pooled_output": torch.zeros(1, 32)}]]},
        {"latent_image": {"samples": torch.zeros(2, 16, 32, 32)}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_is_kept_counts_for_the_same_kind_of_run_only(timed, other):
    tuned(timed)
    assert tuned(timed, **other).runs > 0


def calls(function, *args, **kwargs):
    return function(*args, **kwargs)


@pytest.mark.parametrize(
    "patch",
    [
        lambda model: model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "other", calls),
        lambda model: model.set_model_unet_function_wrapper(
            lambda function, given: function(given["input"], given["timestep"], **given["c"])
        ),
        lambda model: model.add_object_patch(
            "model_sampling", model.get_model_object("model_sampling")
        ),
    ],
    ids=["wrapper", "function", "object"],
)
def test_other_patches_are_another_kind_of_model(timed, patch):
    model, *others = timed
    tuned(timed)
    patched = model.clone()
    patch(patched)
    assert tuned((patched, *others)).runs > 0


def test_what_is_kept_is_in_the_users_folder_and_readable(timed, user_folder):
    found = tuned(timed)
    path = user_folder / "__tome_nodes" / "tune.json"
    assert {*user_folder.rglob("*.*")} == {path, path.with_suffix(".lock")}
    (entry,) = json.loads(path.read_text())["measured"]
    assert entry["of"]["latent"] == [1, 16, 32, 32]
    assert entry["wishes"] == [{"goal": "speed", "amount": 1.2}]
    assert {each["preset"] for each in entry["figures"]} == {
        candidate.preset for candidate in found.figures
    }
    assert {*entry["instead"][0]["others"]} == {*found.instead}


KEPT = tune_cache.Kept(
    "2026-11-23",
    {Candidate("fast", 0.5): Measured(0.5, 1.0, 0.1), BALANCED[0]: Measured(1, 1, 0, "why")},
    (Wish("speed", 1.5), Wish("likeness", 0.1)),
    {BALANCED[0]: {"3 of 4 steps": Measured(0.75, 1.0, 0.2)}, FAST[0]: {}},
)


def test_what_is_kept_comes_back_as_it_was():
    tune_cache.write({"b": 1, "a": [1, 2]}, KEPT)
    tune_cache.write({"a": 3}, replace(KEPT, wishes=()))
    assert tune_cache.read({"a": [1, 2], "b": 1}) == KEPT
    assert tune_cache.read({"a": 3}) == replace(KEPT, wishes=())
    assert tune_cache.read({"a": 4}) == tune_cache.Kept()


def broken(**change):
    figure = {"preset": "fast", "ratio": 0.5, "seconds": 0.5, "unpatched": 1.0, "change": 0.1}
    entry = {"of": {}, "date": "", "figures": [{**figure, "obstacle": None} | change], "wishes": []}
    return json.dumps({"format": "ToMe Tune 1", "measured": [entry]})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "7", '"text"', "null", '{"format": "other"}', '{"format": "ToMe Tune 1"}'),
        *('{"format": "ToMe Tune 1", "measured": {"of": 1}}', "[" * 100_000),
        *('{"format": "ToMe Tune 1", "measured": [{"of": 3}]}', broken(preset="__import__('os')")),
        *(broken(preset=["fast"]), broken(ratio=5.0), broken(obstacle=7)),
        *(broken(seconds=0), broken(seconds=10**400), broken(seconds=float("nan"))),
        *(broken(change="0.1"), broken(change=True)),
    ],
    ids=lambda text: text[:60],
)
def test_a_file_that_is_not_ours_is_left_as_it_is(log_messages, text):
    path = tune_cache.FILE.path
    path.parent.mkdir()
    path.write_text(text)
    assert tune_cache.read({}) == tune_cache.Kept()
    tune_cache.write({}, KEPT)
    assert path.read_text() == text
    assert {*path.parent.iterdir()} == {path, path.with_suffix(".lock")}
    assert ["not as this version writes it" in line for line in log_messages()] == [True] * 2


def test_a_file_that_cannot_be_read_is_no_obstacle(log_messages):
    tune_cache.FILE.path.mkdir(parents=True)
    assert tune_cache.read({}) == tune_cache.Kept()
    tune_cache.write({}, KEPT)
    assert tune_cache.FILE.path.is_dir()
    assert ["cannot be read" in line for line in log_messages()] == [True] * 2


def test_a_folder_that_cannot_be_written_is_no_obstacle(log_messages, user_folder):
    (user_folder / "__tome_nodes").write_text("")
    tune_cache.write({}, KEPT)
    assert log_messages()
    assert (user_folder / "__tome_nodes").read_text() == ""


def test_only_the_latest_measurements_are_kept(monkeypatch):
    monkeypatch.setattr(tune_cache.FILE, "_most", 3)
    for number in (0, 1, 2, 3, 4, 2):
        tune_cache.write({"number": number}, KEPT)
    text = json.loads(tune_cache.FILE.path.read_text())
    assert [entry["of"]["number"] for entry in text["measured"]] == [3, 4, 2]
