"""Runs that merge and are shallow beside what begins or ends in the middle, and other nodes."""

from functools import partial

import comfy.hooks
import pytest
import torch
from comfyui_version import __version__
from common import planned

from tools.environment import NEWEST, is_earlier

if is_earlier(__version__, NEWEST):
    pytest.skip(f"ComfyUI {__version__} lacks some of the nodes", allow_module_level=True)

from comfy_extras.nodes_model_downscale import PatchModelAddDownscale
from compatibility.neighbours import BY_NAME
from host import fast
from models.comfyui import UNETS, conditioning
from test_forecast_runs import levels_of, seen
from test_sampling_run import from_noise

from benchmarks.forecasts.situations import extended
from benchmarks.patches import Control
from tome_nodes import reasons
from tome_nodes.comfyui.attachment import attach, last_run


def spans_of(model, patched, **options):
    """The noise levels of a run, and the steps that were shallow in the patched one."""
    plain, evaluations = seen(model)
    from_noise(plain, 24, **options)
    from_noise(patched, 24, **options)
    return sorted(levels_of(evaluations), reverse=True), last_run(patched).counts.shallow_steps


def deep_shrink(model):
    return PatchModelAddDownscale.execute(model, 1, 2.0, 0.0, 0.5, True, "bicubic", "bicubic")[0]


def ending_control(prompt):
    return extended(
        prompt, control=Control(lambda x: torch.tensor(0.5)).set_cond_hint(None, 1.0, (0.0, 0.5))
    )


def weakening_lora(prompt):
    """As ComfyUI's hook keyframes do, by the percent."""
    hooks = comfy.hooks.create_hook_lora({}, 1.0, 1.0)
    keyframes = comfy.hooks.HookKeyframeGroup()
    for strength, percent in (1.0, 0.0), (0.2, 0.5):
        keyframes.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=percent))
    hooks.set_keyframes_on_hooks(keyframes)
    (hooked,) = comfy.hooks.set_conds_props([prompt], 1.0, "default", hooks=hooks)
    return hooked


@pytest.mark.parametrize(
    ("patch", "prompt"),
    [
        (deep_shrink, list),
        (None, weakening_lora),
        (None, ending_control),
        (None, lambda prompt: [*prompt, *extended(prompt, end_percent=0.5)]),
    ],
    ids=["Deep Shrink", "hooked LoRA", "ControlNet", "second prompt"],
)
def test_the_step_in_which_something_ends_is_whole(sd15, patch, prompt):
    model = sd15 if patch is None else patch(sd15)
    positive = prompt(conditioning(UNETS["sd15"], 5))
    prompts = [positive, conditioning(UNETS["sd15"], 6)]
    end = sd15.get_model_object("model_sampling").percent_to_sigma(0.5)
    levels, shallow = spans_of(model, attach(model, fast()), prompts=prompts)
    first = next(index for index, level in enumerate(levels) if level < end)
    assert shallow == ({*range(24)} - planned(24, ends=3.0)) - {first}


def test_outside_of_its_percents_a_run_is_the_plain_one(sd15):
    """Up to there, the sampler gets the same answers bit for bit."""
    plain, expected = seen(sd15)
    from_noise(plain)
    patched, evaluations = seen(attach(sd15, fast(start_percent=0.5)))
    from_noise(patched)
    end = sd15.get_model_object("model_sampling").percent_to_sigma(0.5)
    outside = [answer for level, _, answer in expected if level > end]
    assert 0 < len(outside) < 20
    for answer, (_, _, own) in zip(outside, evaluations, strict=False):
        assert torch.equal(answer, own)
    counts = last_run(patched).counts
    assert counts.merged and counts.shallow_steps
    assert min(counts.shallow_steps) >= len(outside)


def test_two_samplers_on_one_model_are_two_runs(sd15):
    """The second takes over the noise that the first leaves, and knows nothing of the first."""
    patched = attach(sd15, fast())
    halves = ({"last_step": 20, "force_full_denoise": False}, {"start_step": 20})
    alone = [from_noise(attach(sd15, fast()), 40, picture=1.0, **half) for half in halves]
    both = [from_noise(patched, 40, picture=1.0, **half) for half in halves]
    assert all(torch.equal(one, other) for one, other in zip(alone, both, strict=True))
    assert not torch.equal(both[0], from_noise(sd15, 40, picture=1.0, **halves[0]))


@pytest.mark.parametrize("is_last", [False, True])
def test_easycache_leaves_steps_alone_and_merging_goes_on(sd15, log_messages, is_last):
    cache = partial(BY_NAME["EasyCache"].patch, kind="sd15")
    model = cache(attach(sd15, fast())) if is_last else attach(cache(sd15), fast())
    assert from_noise(model).isfinite().all()
    assert str(reasons.CACHE) in log_messages()[-1] and "merged" in log_messages()[-1]
    assert not last_run(model).counts.shallow_steps
