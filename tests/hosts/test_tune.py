"""ToMe Tune on real models: what it measures, what it takes, and what it keeps."""

import json
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import comfy.model_management
import folder_paths
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

WISH = Wish("speed", 1.2)

pytestmark = pytest.mark.usefixtures("user_folder")


@pytest.fixture
def timed(models):
    return Timed(models("flux").clone(), sampling)


@pytest.fixture
def timed_unet(sd15):
    return Timed(sd15.clone(), sampling_of_unet)


def sampling(kind="flux", size=(32, 32), **others):
    tiny = TINY[kind]
    run = {
        "positive": tiny_models.conditioning(tiny, 5),
        "negative": tiny_models.conditioning(tiny, 6),
        "latent_image": {"samples": torch.zeros(1, tiny.channels, *size)},
        **{"seed": 1, "steps": 8, "cfg": 1.0, "denoise": 1.0},
        **{"sampler_name": "euler", "scheduler": "normal"},
    }
    return Sampling(**run | others)


def sampling_of_unet(**others):
    return sampling(
        positive=conditioning(0.5),
        negative=conditioning(0.25),
        latent_image={"samples": torch.zeros(1, 4, 16, 16)},
        **others,
    )


def before_evaluations(model, do):
    """Call a function before each evaluation: with the settings if it merges, and its noise."""

    def wrapper(executor, *args, **kwargs):
        run = args[5].get(KEY)
        do(None if run is None else run._config, args[1], args[5]["sample_sigmas"])
        return executor(*args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", wrapper)


class Timed:
    """A model whose evaluations take the time that a test wants.

    Attributes:
        seen: the settings of each evaluation, None for an unpatched model.
    """

    def __init__(self, model, sampling):
        self.model, self.sampling = model, sampling
        self.clock, self.seen = FakeClock(), []
        before_evaluations(model, self._spend)

    def _spend(self, config, noise, levels):
        # Every fourth step, counted back from the last but one.
        full = levels.flip(0)[2::4]
        is_full = config is not None and config.scope == "stack" and noise.max() in full
        self.clock.time += 1.0 if config is None else 1 / self.speed(config, is_full)
        self.seen.append(config)

    def speed(self, config, is_full):
        preset = "fast" if config.scope == "stack" else "balanced"
        return 1.0 if is_full else SPEEDS[preset][config.ratio]

    def trials(self, **others):
        return Trials(self.model, self.sampling(**others), clock=self.clock)

    def tune(self, wish=WISH, model=None, measure_again=False, **others):
        make_trials = partial(Trials, clock=self.clock)
        run = self.sampling(**others)
        return tune(model or self.model, run, wish, measure_again, make_trials)


def change(sampled, plain):
    """The root mean square of the difference of two latents, in standard deviations."""
    sampled, plain = sampled.double(), plain.double()
    return ((sampled - plain).square().mean().sqrt() / plain.std()).item()


def test_a_known_front_is_found(timed):
    found = timed.tune()
    assert found.candidate == Candidate("balanced", 0.6)
    assert found.measured.unpatched == 1.0
    assert found.measured.speed == pytest.approx(1.25)
    assert found.measured.change > 0
    assert found.runs == len(timed.seen) / 8
    assert not is_attached(timed.model) and overridden(timed.model) == []


def test_steps_on_all_tokens_count_at_their_share(timed):
    """*fast* runs five of twenty steps on all tokens."""
    measured = timed.trials(steps=20).measure(Candidate("fast", 0.5))
    assert measured.seconds == pytest.approx(5 / 20 * 1.0 + 15 / 20 * 0.5)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("candidate", [BALANCED[2], FAST[2]], ids=str)
def test_evaluations_that_compile_do_not_count(timed, candidate, steps):
    expected = timed.trials(steps=steps).measure(candidate)
    before, compiled = timed.speed, set()

    def slow_at_first(config, is_full):
        is_new = is_full not in compiled
        compiled.add(is_full)
        return before(config, is_full) / (50 if is_new else 1)

    timed.speed = slow_at_first
    measured = timed.trials(steps=steps).measure(candidate)
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
    found = timed.tune(Wish("speed", 1.3), steps=steps)
    assert 0 < found.runs <= 9 or steps == 1
    assert not any(name.startswith("0 of") for name in found.instead)
    again = timed.tune(Wish("speed", 1.3), steps=steps, seed=2)
    assert found.runs == len(timed.seen) / steps
    assert again.runs == 0 and again.date
    assert (again.candidate, again.figures) == (found.candidate, found.figures)
    assert again.instead == found.instead


def test_fewer_steps_take_no_longer_than_what_is_found(timed):
    """As fast as the settings, at 4 of 5 steps; their change is that of the host's sampling."""
    found = timed.tune(steps=5)
    assert found.measured.speed == pytest.approx(1.25)
    fewer = found.instead["4 of 5 steps"]
    assert fewer.speed == pytest.approx(1.25)
    plain, short = (
        tiny_models.sample(
            timed.model, TINY["flux"], (32, 32), steps=steps, cfg=1.0, scheduler="normal"
        )
        for steps in (5, 4)
    )
    assert fewer.change == pytest.approx(change(short, plain), rel=1e-3)


def test_the_hosts_cache_is_tried_alone_and_with_the_settings(models, monkeypatch):
    """With a threshold so high that it skips most evaluations of this model."""
    monkeypatch.setattr(trials, "EASY_CACHE_DEFAULTS", (3.0, 0.0, 1.0, False))
    model, clock = models("flux"), FakeClock()

    def spend(*_):
        clock.time += 1.0

    with model.model.diffusion_model.img_in.register_forward_pre_hook(spend):
        found = Trials(model, sampling(), clock=clock).instead(BALANCED[2], 1.2)
    assert found[EASY_CACHE].speed > 1.5 and found[EASY_CACHE].change > 0
    assert found[BOTH].speed > 1.5 and found[BOTH].change != found[EASY_CACHE].change
    assert "easycache" not in model.model_options["transformer_options"]


def test_a_cache_that_skips_nothing_is_not_tried_with_the_settings(timed):
    found = timed.tune(steps=4)
    assert found.instead[EASY_CACHE].change == 0
    assert BOTH not in found.instead


def test_a_model_with_a_cache_is_tried_with_it_alone(timed):
    (cached,) = nodes_easycache.EasyCacheNode.execute(timed.model, 0.2, 0.15, 0.95, False).args
    found = timed.tune(model=cached)
    assert EASY_CACHE not in found.instead


def test_a_picture_to_start_from_has_its_own_steps_on_all_tokens(timed):
    latent = {"samples": torch.ones(1, 16, 32, 32), "noise_mask": torch.ones(1, 32, 32)}
    found = timed.tune(Wish("speed", 1.4), latent_image=latent, denoise=0.5)
    assert found.candidate is not None


def test_the_model_that_comes_in_may_merge_already(timed):
    """It is the same kind of model."""
    patched = attach(timed.model, ToMeConfig(**settings_of("fast", {"ratio": 0.7})))
    found = timed.tune(model=patched)
    assert found.measured.unpatched == 1.0
    assert last_run(patched) is None
    assert timed.tune().runs == 0


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
    found = timed.tune(wish)
    assert found.candidate is None
    assert timed.seen == []


def test_a_run_too_short_to_forecast_is_compared_with_fewer_steps(timed):
    found = timed.tune(steps=3)
    assert found.candidate is None
    assert found.instead["2 of 3 steps"].speed == pytest.approx(1.5)
    assert found.instead["2 of 3 steps"].change > 0
    assert BOTH not in found.instead
    again = timed.tune(steps=3)
    assert (again.runs, again.instead) == (0, found.instead)
    # Another wish is compared with the steps that fulfil it.
    faster = timed.tune(Wish("speed", 2.0), steps=3)
    assert [*faster.instead] == ["1 of 3 steps", EASY_CACHE]
    assert timed.tune(steps=3).runs == 0
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
    found = timed.tune(denoise=denoise)
    assert found.obstacle == f"with denoise {denoise:g} there is nothing to sample"
    assert timed.seen == []


def test_a_trial_that_fails_leaves_the_others(timed_unet, log_messages):

    def fail(config, *_):
        if config is not None and config.scope == "stack":
            raise ValueError("no room")

    before_evaluations(timed_unet.model, fail)
    # It need not come again.
    for _ in range(2):
        found = timed_unet.tune(Wish("speed", 1.35))
        assert found.candidate == Candidate("balanced", 0.75)
        assert found.runs > 0
    assert "[ToMe] fast, ratio 0.50: ValueError: no room" in log_messages()


def test_the_presets_are_one_ladder_in_a_transformer_and_two_in_a_unet(timed, timed_unet):
    wish = Wish("speed", 1.35)
    found = timed_unet.tune(wish)
    assert {candidate.preset for candidate in found.figures} == {"balanced", "fast"}
    assert {candidate.preset for candidate in timed.tune(wish).figures} == {"balanced"}


def test_an_answer_that_is_not_finite_is_a_failure(timed):

    def spoil(executor, *args, **kwargs):
        run = args[5].get(KEY)
        return executor(*args, **kwargs) * (1 if run is None else float("nan"))

    timed.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "spoil", spoil)
    found = timed.tune(Wish("speed", 1.35))
    assert found.candidate is None
    assert all(measured.has_failed for measured in found.figures.values())
    assert pages.tuning_page(found).text.startswith("Unpatched: ")


def test_what_is_done_once_in_a_run_counts_for_neither(timed):
    """As a ControlNet encodes its picture."""

    def prepare(executor, *args, **kwargs):
        timed.clock.is_prepared = False
        return executor(*args, **kwargs)

    def spend(*_):
        timed.clock.time += 0.0 if timed.clock.is_prepared else 7.0
        timed.clock.is_prepared = True

    timed.model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "prepare", prepare)
    before_evaluations(timed.model, spend)
    here, candidate = timed.trials(), Candidate("balanced", 0.6)
    measured = here.measure(candidate)
    assert (measured.unpatched, measured.speed) == pytest.approx((1.0, 1.25))
    for fewer in 1, 2:
        instead = here.instead(candidate, 8 / fewer)
        assert instead[f"{fewer} of 8 steps"].speed == pytest.approx(8 / fewer)


def test_tensors_among_the_options_of_other_nodes(timed):
    timed.model.model_options["transformer_options"]["audio"] = torch.zeros(2, 3)
    assert timed.tune().candidate is not None


def test_an_interrupt_ends_the_trials_and_leaves_nothing(timed, user_folder):
    interrupted = comfy.model_management.InterruptProcessingException

    def interrupt(*_):
        if len(timed.seen) == 9:
            comfy.model_management.interrupt_current_processing()

    before_evaluations(timed.model, interrupt)
    with pytest.raises(interrupted):
        timed.tune()
    assert overridden(timed.model) == []
    assert not tune_cache.file().exists()
    assert len(timed.seen) == 9


def test_another_wish_goes_on_from_what_is_kept(timed):
    first = timed.tune()
    second = timed.tune(Wish("speed", 1.4))
    assert second.figures.items() > first.figures.items()
    again = timed.tune()
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
    timed.tune()
    assert timed.tune(**other).runs > 0


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
    timed.tune()
    patched = timed.model.clone()
    patch(patched)
    assert timed.tune(model=patched).runs > 0


def test_what_is_kept_is_in_the_users_folder_and_readable(timed, user_folder):
    timed.tune()
    path = user_folder / "__tome_nodes" / "tune.json"
    assert [*user_folder.rglob("*.*")] == [path]
    (entry,) = json.loads(path.read_text())["measured"]
    assert entry["of"]["latent"] == [1, 16, 32, 32]


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


def file_with(**change):
    """A file of a version that kept no more than figures, with a change of one."""
    figure = {"preset": "fast", "ratio": 0.5, "seconds": 0.5, "unpatched": 1.0, "change": 0.1}
    entry = {"of": {}, "date": "", "figures": [{**figure, "obstacle": None} | change], "wishes": []}
    return json.dumps({"format": "ToMe Tune 1", "measured": [entry]})


def test_a_file_of_an_earlier_version_is_read():
    tune_cache.file().parent.mkdir()
    tune_cache.file().write_text(file_with())
    assert tune_cache.read({}).figures == {Candidate("fast", 0.5): Measured(0.5, 1.0, 0.1)}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "7", '"text"', "null", "[" * 100_000),
        *('{"format": "other"}', '{"format": "ToMe Tune 1"}'),
        *(
            f'{{"format": "ToMe Tune 1", "measured": {each}}}'
            for each in ('{"of": 1}', '[{"of": 3}]')
        ),
        *(file_with(preset=preset) for preset in ("__import__('os')", ["fast"])),
        *(file_with(seconds=seconds) for seconds in (0, 10**400, float("nan"))),
        *(file_with(change=change) for change in ("0.1", True)),
        *(file_with(ratio=5.0), file_with(obstacle=7)),
    ],
    ids=lambda text: text[:60],
)
def test_a_file_that_is_not_ours_is_left_as_it_is(log_messages, text):
    path = tune_cache.file()
    path.parent.mkdir()
    path.write_text(text)
    assert tune_cache.read({}) == tune_cache.Kept()
    tune_cache.write({}, KEPT)
    assert path.read_text() == text
    assert [*path.parent.iterdir()] == [path]
    assert ["not as this version writes it" in line for line in log_messages()] == [True] * 2


def test_a_file_that_cannot_be_read_is_no_obstacle(log_messages):
    tune_cache.file().mkdir(parents=True)
    assert tune_cache.read({}) == tune_cache.Kept()
    tune_cache.write({}, KEPT)
    assert tune_cache.file().is_dir()
    assert ["cannot be read" in line for line in log_messages()] == [True] * 2


def test_a_folder_that_cannot_be_written_is_no_obstacle(log_messages, user_folder):
    (user_folder / "__tome_nodes").write_text("")
    tune_cache.write({}, KEPT)
    assert log_messages()
    assert (user_folder / "__tome_nodes").read_text() == ""


def test_only_the_latest_measurements_are_kept(monkeypatch):
    monkeypatch.setattr(tune_cache, "_MOST", 3)
    for number in (0, 1, 2, 3, 4, 2):
        tune_cache.write({"number": number}, KEPT)
    text = json.loads(tune_cache.file().read_text())
    assert [entry["of"]["number"] for entry in text["measured"]] == [3, 4, 2]


def test_a_file_that_several_processes_write_at_the_same_time_stays_whole():
    context = get_context("fork")
    start = context.Barrier(3)

    def write(by):
        start.wait()
        for number in range(40):
            tune_cache.write({"by": by, "number": number}, KEPT)
            assert json.loads(tune_cache.file().read_text())["measured"]

    writers = [context.Process(target=write, args=(by,)) for by in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    kept = [entry["of"] for entry in json.loads(tune_cache.file().read_text())["measured"]]
    # The last to write has lost nothing.
    assert any({"by": by, "number": 39} in kept for by in range(3))
    assert [*tune_cache.file().parent.iterdir()] == [tune_cache.file()]


def test_a_folder_with_any_name_will_do(user_folder):
    folder_paths.set_user_directory(str(user_folder / "Bücher und 絵 & co"))
    tune_cache.write({}, KEPT)
    assert tune_cache.read({}) == KEPT
