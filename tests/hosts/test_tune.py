"""ToMe Tune on real models: what it measures, what it takes, and what it keeps."""

import json
import re
from itertools import pairwise
from pathlib import Path
from weakref import WeakMethod

import comfy.controlnet
import comfy.model_management
import comfy.sd
import folder_paths
import pytest
import torch
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrappersMP
from comfy_extras import nodes_easycache, nodes_model_advanced
from common import FakeClock
from host import conditioning, keys_only, overridden, sample
from models import comfyui as tiny_models
from models.checkpoints import write_checkpoint
from models.comfyui import TINY

from benchmarks.patches import Control
from tome_nodes import reasons
from tome_nodes.comfyui.attachment import KEY, attach, is_attached, last_run
from tome_nodes.comfyui.models import transformers
from tome_nodes.comfyui.tune import tune_cache, tuner
from tome_nodes.comfyui.tune.trials import Sampling, Trials
from tome_nodes.comfyui.tune.tuner import EASY_CACHE, tune
from tome_nodes.report import pages
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import PRESETS, settings_of
from tome_nodes.strategies.window import WindowStrategy
from tome_nodes.tuning.search import BALANCED, FAST, Candidate, Measured, Wish

SPEEDS = {"balanced": {0.3: 1.05, 0.6: 1.25, 0.85: 1.5}, "fast": {0.3: 1.25, 0.5: 2.0, 0.7: 3.0}}

WISH = Wish("speed", 1.2)

pytestmark = pytest.mark.usefixtures("user_folder")


@pytest.fixture
def timed(models):
    return Timed(models("flux").clone(), sampling, answers_on_a_line=True)


@pytest.fixture
def timed_unet(sd15, change_policy, monkeypatch):
    # Its only level is one whose stacks fast would spare, so both presets would change as much.
    change_policy("fast", keys_down_to=0)
    # Its time is that of its evaluations.
    name = "tome_nodes.comfyui.attachment._Attachment._may_be_shallow"
    monkeypatch.setattr(name, lambda *_: False)
    return Timed(sd15.clone(), sampling_of_unet)


def sampling(kind="flux", size=(32, 32), **others):
    tiny = TINY[kind]
    prompts = (tiny_models.conditioning(tiny, seed) for seed in (5, 6))
    run = {
        **dict(zip(("positive", "negative"), prompts, strict=True)),
        "latent_image": {"samples": torch.zeros(1, tiny.channels, *size)},
        **{"seed": 1, "steps": 8, "cfg": 1.0, "denoise": 1.0},
        **{"sampler_name": "euler", "scheduler": "simple"},
    }
    return Sampling(**run | others)


def before_evaluations(model, do):
    def wrapper(executor, *args, **kwargs):
        run = args[5].get(KEY)
        do(None if run is None else run._run.config, args[1], args[5]["sample_sigmas"])
        return executor(*args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", wrapper)


def answer_on_a_line(model):
    """Answer in place of a model with random weights, whose answers turn back from step to step."""
    picture = torch.randn(1, 16, 32, 32, generator=torch.Generator().manual_seed(0))

    def wrapper(executor, x, t, *args, **kwargs):
        return (1 - t.max()) ** 2 * picture[..., : x.shape[-2], : x.shape[-1]].to(x).expand(x.shape)

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "line", wrapper)


def sampling_of_unet(**others):
    prompts = {"positive": conditioning(0.5), "negative": conditioning(0.25)}
    return sampling(latent_image={"samples": torch.zeros(1, 4, 16, 16)}, **prompts | others)


class Timed:
    """A model whose evaluations take the time that a test wants, and their settings."""

    def __init__(self, model, sampling, answers_on_a_line=False):
        self.model, self.sampling = model, sampling
        self.clock, self.seen = FakeClock(), []
        # What has changed is measured again, but this one's state is none of the model.
        spend = WeakMethod(self._spend)
        before_evaluations(model, lambda *given: spend()(*given))
        if answers_on_a_line:
            answer_on_a_line(model)

    def _spend(self, config, *_):
        self.clock.time += 1.0 if config is None else 1 / self.speed(config)
        self.seen.append(config)

    def speed(self, config):
        is_fast = config.policy == PRESETS["fast"].policy
        return SPEEDS["fast" if is_fast else "balanced"][config.ratio]

    def measure(self, candidate, **others):
        trials = Trials(self.model, self.sampling(**others), 9, self.clock)
        return trials.measure(str(candidate), attach(self.model, configured(candidate)))

    def tune(self, wish=WISH, model=None, measure_again=False, **others):
        return tune(model or self.model, self.sampling(**others), wish, measure_again, self.clock)


def configured(candidate):
    return ToMeConfig(**settings_of(candidate.preset, {"ratio": candidate.ratio}))


def change(sampled, plain):
    """The root mean square of the difference of two latents, in standard deviations."""
    sampled, plain = sampled.double(), plain.double()
    return ((sampled - plain).square().mean().sqrt() / plain.std()).item()


def test_a_known_front_is_found(timed_unet):
    result = timed_unet.tune()
    assert [*result.figures] == [*BALANCED, *FAST]
    assert result.candidate == Candidate("balanced", 0.6)
    assert result.measured.unpatched == 1.0
    assert result.measured.speed == pytest.approx(1.25)
    assert result.measured.change > 0
    assert result.runs == len(timed_unet.seen) / 8
    assert re.fullmatch(r"merged \d of \d blocks", result.measured.done)
    assert not is_attached(timed_unet.model) and overridden(timed_unet.model) == []


def test_in_a_transformer_one_preset_is_tried_and_another_wish_goes_on_from_it(timed):
    first = timed.tune(steps=16)
    assert [*first.figures] == BALANCED
    speeds = [measured.speed for measured in first.figures.values()]
    assert speeds == sorted({*speeds})
    faster = timed.tune(Wish("speed", 2.0), steps=16)
    assert faster.figures == first.figures
    # It is compared with other fewer steps.
    assert 0 < faster.runs < 2
    again = timed.tune(steps=16)
    assert (again.candidate, again.runs) == (first.candidate, 0)


@pytest.mark.parametrize("candidate", BALANCED, ids=str)
def test_steps_that_are_forecast_take_no_time(timed, candidate):
    measured = timed.measure(candidate, steps=16)
    evaluations = len(timed.seen) - 16
    assert 3 <= evaluations < 16
    assert measured.speed == pytest.approx(16 / evaluations)
    assert measured.done == f"forecast {16 - evaluations} of 16 steps"


@pytest.mark.parametrize(
    ("candidate", "steps"), [(BALANCED[1], 1), (BALANCED[1], 20), (FAST[1], 2)], ids=str
)
def test_the_first_evaluation_which_compiles_does_not_count(timed_unet, candidate, steps):
    expected = timed_unet.measure(candidate, steps=steps)
    before, compiled = timed_unet.speed, set()

    def slow_at_first(config):
        is_new = config not in compiled
        compiled.add(config)
        return before(config) / (50 if is_new else 1)

    timed_unet.speed = slow_at_first
    measured = timed_unet.measure(candidate, steps=steps)
    assert len(compiled) > 0
    assert measured.seconds == pytest.approx(expected.seconds)


@pytest.mark.parametrize(
    ("candidate", "sampler"),
    [(BALANCED[2], "dpmpp_2m"), (FAST[1], "euler_ancestral"), (BALANCED[2], "heun")],
    ids=str,
)
def test_the_change_is_that_of_the_samplers_own_pictures(sd15, candidate, sampler):
    """Against the host's sampling without any of this code."""
    run = sampling_of_unet(steps=2, sampler_name=sampler, scheduler="karras")
    state = torch.get_rng_state()
    patched = attach(sd15, configured(candidate))
    measured = Trials(sd15, run, 9, None).measure("", patched)
    assert torch.equal(torch.get_rng_state(), state)
    pictures = (
        sample(model, (16, 16), cfg=1.0, sampler=sampler, scheduler="karras")
        for model in (patched, sd15)
    )
    assert measured.change == pytest.approx(change(*pictures), rel=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_what_trials_take_is_counted_and_kept(timed_unet, steps):
    """Also for another seed, and a prompt of another length."""
    first = timed_unet.tune(steps=steps)
    assert 0 < first.runs <= 9 or steps == 1
    assert not any(name.startswith("0 of") for name in first.instead)
    ((text, extras),) = conditioning(0.5)
    again = timed_unet.tune(steps=steps, seed=2, positive=[[text.repeat(1, 2, 1), extras]])
    assert first.runs == len(timed_unet.seen) / steps
    assert again.runs == 0 and again.date
    assert again.tried == first.tried


def test_fewer_steps_take_no_longer_than_what_is_found(timed_unet):
    """As fast as the settings, at 8 of 10 steps; their change is that of the host's sampling."""
    result = timed_unet.tune(steps=10)
    assert result.measured.speed == pytest.approx(1.25)
    fewer = result.instead["8 of 10 steps"]
    assert fewer.speed == pytest.approx(1.25)
    pictures = (
        sample(timed_unet.model, (16, 16), steps=steps, cfg=1.0, scheduler="simple")
        for steps in (8, 10)
    )
    assert fewer.change == pytest.approx(change(*pictures), rel=1e-3)


def test_the_hosts_cache_is_tried(models, monkeypatch):
    """With a threshold so high that it skips most evaluations of this model."""
    monkeypatch.setattr(tuner, "_EASY_CACHE_DEFAULTS", (3.0, 0.0, 1.0, False))
    model, clock = models("flux"), FakeClock()

    def spend(*_):
        clock.time += 1.0

    with model.model.diffusion_model.img_in.register_forward_pre_hook(spend):
        cached = tune(model, sampling(), WISH, clock=clock).instead[EASY_CACHE]
    assert cached.speed > 1.5 and cached.change > 0
    assert "easycache" not in model.model_options["transformer_options"]


def test_a_model_with_a_cache_is_tried_with_it_alone(timed):
    assert EASY_CACHE in timed.tune(steps=4).instead
    (cached,) = nodes_easycache.EasyCacheNode.execute(timed.model, 0.2, 0.15, 0.95, False).args
    assert EASY_CACHE not in timed.tune(model=cached, steps=4).instead


def test_a_picture_to_start_from_and_tensors_among_the_options_of_other_nodes(timed):
    timed.model.model_options["transformer_options"]["audio"] = torch.zeros(2, 3)
    latent = {"samples": torch.ones(1, 16, 32, 32), "noise_mask": torch.ones(1, 32, 32)}
    assert timed.tune(latent_image=latent, denoise=0.5).candidate is not None


def test_a_model_that_is_patched_already_is_of_the_same_kind_and_what_is_kept_is_readable(
    timed, user_folder
):
    patched = attach(timed.model, configured(FAST[2]))
    assert timed.tune(model=patched).measured.unpatched == 1.0
    assert last_run(patched) is None
    assert timed.tune().runs == 0
    (path,) = user_folder.rglob("*.*")
    assert path.parent == user_folder / "__tome_nodes" / "tune"
    kept = json.loads(path.read_text())
    assert kept["of"]["latent"] == [1, 16, 32, 32]
    assert {"balanced, ratio 0.60", EASY_CACHE} < kept["tried"].keys()


def test_a_run_too_short_to_forecast_is_compared_with_fewer_steps(timed):
    result = timed.tune(steps=3)
    assert result.candidate is None
    assert result.instead["2 of 3 steps"].speed == pytest.approx(1.5)
    assert result.instead["2 of 3 steps"].change > 0
    # Another wish is compared with the steps that fulfil it.
    faster = timed.tune(Wish("speed", 2.0), steps=3)
    assert [*faster.instead] == ["1 of 3 steps", EASY_CACHE]
    for measured in result.figures.values():
        assert measured.obstacle.startswith("nothing was forecast: a run of 3 is too short")
    assert pages.tuning_page(result).text.startswith("Unpatched: nothing was forecast: a run of 3")


def test_ratios_below_one_that_forecasts_nothing_are_tried(timed):
    """The prompts change around step 6 of 9, and 0.85 lets the model run in that step alone."""
    positive = [
        [text, {**extras, "start_percent": start / 9, "end_percent": end / 9}]
        for start, end in pairwise((0, 1.5, 5.5, 9))
        for text, extras in sampling().positive
    ]
    result = timed.tune(steps=9, positive=positive)
    highest, lowest = result.figures[BALANCED[2]], result.figures[BALANCED[0]]
    assert highest.obstacle.startswith(f"nothing was forecast: {reasons.CHANGES}")
    assert lowest.speed == pytest.approx(9 / 8)


def test_what_was_in_the_way_is_no_longer_said_once_it_is_gone(
    timed_unet, monkeypatch, user_folder
):
    """Also of a run whose memory runs out after some steps have merged."""
    plan, calls = WindowStrategy.plan, []

    def no_room(*args):
        calls.append(None)
        if len(calls) > 20:
            raise torch.OutOfMemoryError("no room")
        return plan(*args)

    with monkeypatch.context() as context:
        context.setattr(WindowStrategy, "plan", no_room)
        first = timed_unet.tune()
    assert {measured.obstacle for measured in first.figures.values()} > {
        f"merging stopped: {reasons.NO_MEMORY}",
    }
    assert first.candidate is None
    kept = [json.loads(path.read_text())["tried"] for path in user_folder.rglob("*.json")]
    assert [
        measured for by_name in kept for measured in by_name.values() if measured["obstacle"]
    ] == []
    assert timed_unet.tune().candidate == Candidate("balanced", 0.6)


def test_a_model_that_cannot_be_patched_stays_as_it_is(timed, monkeypatch):
    monkeypatch.setitem(transformers.KEEPS_STATE, "comfy.ldm.flux.model.Flux", "it remembers")
    result = timed.tune()
    assert result.candidate is None
    assert result.obstacle == "no step of a Flux can be forecast: it remembers; leave the node out"
    assert timed.seen == []


@pytest.mark.parametrize(("kind", "size"), [("wan21", (3, 32, 32)), ("ltxav", (2, 16, 16))])
def test_videos_with_and_without_sound(models, kind, size):
    tiny, model = TINY[kind], models(kind)
    latent = torch.zeros(1, tiny.channels, *size)
    if tiny.sound is not None:
        latent = NestedTensor([latent, torch.zeros(1, *tiny.sound)])
    run = sampling(kind, steps=4, latent_image={"samples": latent}, cfg=3.0)
    measured = Trials(model, run, 9, None).measure("", attach(model, keys_only()))
    assert measured.obstacle is None and measured.change > 0


def test_a_node_that_answers_in_place_of_the_model_is_said(models):
    model = models("flux").clone()
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "theirs", lambda _, x, *args: 0.5 * x)
    result = tune(model, sampling(steps=2), WISH)
    assert {measured.obstacle for measured in result.figures.values()} == {
        "nothing was done: another node answers in place of the model; remove one of the two"
    }
    assert result.candidate is None


def test_where_there_is_nothing_to_do_no_trial_runs(timed):
    for denoise in 0.0, 1e-9:
        said = f"with denoise {denoise:g} there is nothing to sample"
        assert timed.tune(denoise=denoise).obstacle == said
    # What the unpatched model fulfils.
    for wish in Wish("speed", 1.0), Wish("likeness", 0.0):
        assert timed.tune(wish).candidate is None
    assert timed.seen == []


def test_a_trial_that_fails_leaves_the_others(timed_unet, log_messages):
    def fail(config, *_):
        if config is not None and config.ratio in (0.5, 0.7):
            raise ValueError("no room")

    before_evaluations(timed_unet.model, fail)
    # It need not come again.
    for _ in range(2):
        result = timed_unet.tune(Wish("speed", 1.35))
        assert result.candidate == Candidate("balanced", 0.85)
        assert result.runs > 0
    assert result.figures[FAST[1]].obstacle == "the trial failed: ValueError: no room"
    assert result.figures[FAST[0]].obstacle is None
    assert "[ToMe] fast, ratio 0.50: ValueError: no room" in log_messages()


def test_an_answer_that_is_not_finite_is_a_failure(timed_unet):
    def spoil(executor, *args, **kwargs):
        run = args[5].get(KEY)
        return executor(*args, **kwargs) * (1 if run is None else float("nan"))

    timed_unet.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "spoil", spoil)
    result = timed_unet.tune()
    assert result.candidate is None
    failed = "the trial failed: the picture is not finite"
    assert {measured.obstacle for measured in result.figures.values()} == {failed}
    said = f"Unpatched: {failed}."
    assert pages.tuning_page(result).text.startswith(said)


def test_what_is_done_once_in_a_run_counts_for_neither(timed_unet):
    clock = timed_unet.clock

    def prepare(executor, *args, **kwargs):
        clock.is_prepared = False
        return executor(*args, **kwargs)

    def spend(*_):
        clock.time += 0.0 if clock.is_prepared else 7.0
        clock.is_prepared = True

    timed_unet.model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "prepare", prepare)
    before_evaluations(timed_unet.model, spend)
    measured = timed_unet.measure(BALANCED[1])
    assert (measured.unpatched, measured.speed) == pytest.approx((1.0, 1.25))
    trials = Trials(timed_unet.model, timed_unet.sampling(), 9, clock)
    for fewer in 1, 2:
        assert trials.measure("", trials.plain, fewer).speed == pytest.approx(8 / fewer)


def test_an_interrupt_ends_the_trials_and_leaves_nothing(timed_unet, user_folder):
    def interrupt(*_):
        if len(timed_unet.seen) == 9:
            comfy.model_management.interrupt_current_processing()

    before_evaluations(timed_unet.model, interrupt)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        timed_unet.tune()
    assert overridden(timed_unet.model) == []
    assert [*user_folder.rglob("*.json")] == []
    assert len(timed_unet.seen) == 9


REFERENCE = {"pooled_output": torch.zeros(1, 32), "reference_latents": [torch.zeros(1, 16, 8, 8)]}


def test_what_is_kept_counts_for_the_same_kind_of_run_and_model_only(timed):
    timed.tune()
    for other in (
        *({"size": (32, 24)}, {"steps": 6}, {"cfg": 3.0}, {"cfg": 7.0}, {"measure_again": True}),
        *({"denoise": 0.6}, {"sampler_name": "heun"}, {"scheduler": "karras"}),
        {"positive": [[torch.zeros(1, 5, 32), REFERENCE]]},
        {"latent_image": {"samples": torch.zeros(2, 16, 32, 32)}},
    ):
        assert timed.tune(**other).runs > 0, other
    wrapped, evaluated, patched = (timed.model.clone() for _ in range(3))
    wrapped.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "other", lambda run, *args: run(*args))
    evaluated.set_model_unet_function_wrapper(
        lambda apply, given: apply(given["input"], given["timestep"], **given["c"])
    )
    patched.add_object_patch("model_sampling", patched.get_model_object("model_sampling"))
    for changed in wrapped, evaluated, patched:
        assert timed.tune(model=changed).runs > 0


def shifted(model, value):
    return nodes_model_advanced.ModelSamplingFlux().patch(model, value, 0.5, 512, 512)[0]


def rescaled(model, value):
    return nodes_model_advanced.RescaleCFG().patch(model, value)[0]


def with_lora(model, value):
    model = model.clone()
    (key, *_) = (key for key in model.model.state_dict() if key.endswith("img_in.weight"))
    change = torch.zeros_like(model.model.state_dict()[key])
    model.add_patches({key: ("diff", (change,))}, value)
    return model


@pytest.mark.parametrize("patched", [shifted, rescaled, with_lora])
def test_another_value_of_a_node_before_it_is_measured(timed, patched):
    timed.tune(model=patched(timed.model, 1.25), steps=4)
    again = patched(timed.model, 1.25)
    assert timed.tune(model=again, steps=4).runs == 0
    assert timed.tune(model=patched(timed.model, 1.5), steps=4).runs > 0


def test_another_file_of_the_same_kind_is_measured(tmp_path):
    paths = [tmp_path / f"{name}.ckpt" for name in ("one", "two")]
    for path in paths:
        write_checkpoint(path, "sd15", levels=1, unet_only=True)

    # To measure models as large as those that are loaded takes long.
    def key(path):
        model, run = comfy.sd.load_diffusion_model(str(path)), sampling_of_unet()
        return tuner._key(model, run, Trials(model, run, 9, FakeClock()))

    first, again, second = map(key, (paths[0], *paths))
    assert first == again
    assert first != second


def test_another_strength_or_range_of_a_controlnet_is_measured(timed):
    def is_measured(strength, until):
        control = Control(torch.clone, "middle").set_cond_hint(None, strength, (0.0, until))
        ((text, extras),) = sampling().positive
        prompt = [[text, {**extras, "control": control, "control_apply_to_uncond": True}]]
        return timed.tune(positive=prompt, steps=4).runs > 0

    given = (0.5, 1.0), (0.5, 1.0), (0.6, 1.0), (0.5, 0.5)
    assert [is_measured(*values) for values in given] == [True, False, True, True]


OF = {"b": 1, "a": [1, 2]}
KEPT = tune_cache.Kept(
    "2026-11-23",
    {"fast, ratio 0.50": Measured(0.5, 1.0, 0.1), "3 of 4 steps": Measured(1, 1, 0, "why")},
)


def test_what_is_kept_comes_back_as_it_was_from_a_folder_with_any_name(user_folder):
    folder_paths.set_user_directory(
        str(user_folder / "Bücher und \N{CJK UNIFIED IDEOGRAPH-7D75} & co")
    )
    tune_cache.write(OF, KEPT)
    tune_cache.write({"a": 3}, tune_cache.Kept("2026-11-24"))
    assert tune_cache.read({"a": [1, 2], "b": 1}) == KEPT
    assert tune_cache.read({"a": 3}) == tune_cache.Kept("2026-11-24")
    assert tune_cache.read({"a": 4}) == tune_cache.Kept()


def test_what_another_process_has_kept_stays(user_folder):
    tune_cache.write(OF, KEPT)
    other = tune_cache.Kept("2026-11-24", {EASY_CACHE: Measured(0.5, 1.0, 0.1)})
    tune_cache.write(OF, other)
    assert tune_cache.read(OF) == tune_cache.Kept(other.date, {**KEPT.tried, **other.tried})
    (only,) = tune_cache.file(OF).parent.iterdir()
    assert only == tune_cache.file(OF)


def test_a_reader_meets_the_whole_file_before_or_after_a_write(log_messages, monkeypatch):
    """Here, each time that anything is put into place."""
    met = []
    replace = Path.replace

    def replaced(self, target):
        met.append(tune_cache.read(OF))
        replace(self, target)
        met.append(tune_cache.read(OF))

    monkeypatch.setattr(Path, "replace", replaced)
    tune_cache.write(OF, KEPT)
    assert met == [tune_cache.Kept(), KEPT]
    assert log_messages() == []


def file_with(**change):
    facts = {"seconds": 0.5, "unpatched": 1.0, "change": 0.1, "obstacle": None}
    return json.dumps({"date": "2026-11-23", "tried": {EASY_CACHE: facts | change}})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "7", '"text"', "null", "[" * 100_000, '{"date": "", "tried": {"a": 1}}'),
        *(file_with(seconds=seconds) for seconds in (0, -1, "1", None, 10**400, float("nan"))),
        *(file_with(change=change) for change in ("0.1", float("inf"))),
        file_with(other=1),
    ],
    ids=lambda text: text[:80],
)
def test_a_file_that_cannot_be_used_is_replaced(log_messages, text):
    path = tune_cache.file(OF)
    path.parent.mkdir(parents=True)
    path.write_text(file_with())
    assert tune_cache.read(OF).tried == {EASY_CACHE: Measured(0.5, 1.0, 0.1)}
    path.write_text(text)
    assert tune_cache.read(OF) == tune_cache.Kept()
    assert "cannot be used, so ToMe Tune measures anew" in log_messages()[-1]
    tune_cache.write(OF, KEPT)
    assert tune_cache.read(OF) == KEPT


def test_a_folder_that_cannot_be_written_is_no_obstacle(log_messages, user_folder):
    (user_folder / "__tome_nodes").write_text("")
    tune_cache.write(OF, KEPT)
    assert "what was measured is not kept" in log_messages()[-1]
    assert tune_cache.read(OF) == tune_cache.Kept()
