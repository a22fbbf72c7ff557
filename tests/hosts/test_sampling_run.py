"""Runs of UNets that merge tokens and have shallow steps."""

import copy
import re

import pytest
import torch
from common import Shuffle, input_lengths, planned, relative_error
from host import fast, overridden, policy_of
from models.comfyui import KINDS, UNETS, sample

from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.report.pages import in_words
from tome_nodes.settings.config import ToMeConfig

SIZE = 32, 32
BOTH = r"\[ToMe\] merged \d/\d blocks \(.*\), \d+/\d+ steps, shallow (\d+)/(\d+) steps, ratio"


def second_pass(model, steps=8, **options):
    """A run whose picture is there from the start."""
    options = {"picture": 2.0, "start_step": 4 * steps, "cfg": 1.0, **options}
    return sample(model, UNETS["sd15"], SIZE, steps=5 * steps, **options)


def from_noise(model, steps=20, **options):
    return sample(model, UNETS["sd15"], SIZE, steps=steps, **{"cfg": 1.0, **options})


@pytest.mark.parametrize("run", [second_pass, from_noise])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
def test_fast_merges_and_is_shallow_in_one_run(sd15, log_messages, run, sampler):
    patched = attach(sd15, fast())
    result = run(patched, sampler=sampler)
    shallow, total = map(int, re.match(BOTH, log_messages()[-1]).groups())
    assert shallow == total - len(planned(total)) > 0
    assert result.isfinite().all()
    assert overridden(sd15) == []
    assert torch.equal(run(patched, sampler=sampler), result)


def test_tokens_merge_in_the_outermost_block_of_a_shallow_step(sd15):
    blocks = [*sd15.model.diffusion_model.output_blocks[-1][1].transformer_blocks]
    keys = blocks[0].attn1.to_k
    with input_lengths(keys) as lengths:
        from_noise(attach(sd15, fast()))
    assert len(lengths) == 20 and max(lengths) < SIZE[0] * SIZE[1]


@pytest.mark.parametrize("run", [second_pass, from_noise])
def test_a_lossless_plan_leaves_what_shallow_steps_alone_make(sd15, run):
    merged = run(attach(sd15, fast(), Shuffle))
    # Where it would save too little, nothing merges, and steps are shallow all the same.
    patched = attach(sd15, fast(policy=policy_of("fast", least_saved=1.0)))
    alone = run(patched)
    assert not last_run(patched).counts.merged
    assert relative_error(merged, alone) < 0.01 * relative_error(alone, run(sd15))


@pytest.mark.parametrize("forecast", [True, False])
def test_custom_switches_shallow_steps_beside_merging(sd15, forecast):
    patched = attach(sd15, ToMeConfig(ratio=0.5, min_tokens=1, forecast=forecast))
    from_noise(patched)
    counts = last_run(patched).counts
    assert counts.merged and bool(counts.shallow_steps) == forecast


def test_every_step_is_shown_once(sd15):
    lines = []
    from_noise(attach(sd15, fast(), on_step=lines.append))
    assert [int(line.partition("step ")[2].partition("/")[0]) for line in lines] == [*range(1, 21)]
    shallow = [line for line in lines if line.startswith("shallow, step")]
    assert 0 < len(shallow) < 20
    assert all(" blocks, " in line for line in lines if line not in shallow)


def test_the_report_says_both(sd15):
    patched = attach(sd15, fast(), wants_details=lambda: True)
    second_pass(patched)
    lines = in_words(last_run(patched))
    assert re.fullmatch(r"Done: merged \d of \d blocks, shallow in \d of 8 steps", lines[0])
    assert re.search(r"a step took .* whole, .* shallow; expected", lines[1])


@pytest.mark.parametrize("kind", ["flux", "sd15"])
def test_an_error_in_what_is_shown_of_a_skipped_step_loses_no_picture(models, log_messages, kind):
    def broken(text):
        raise ValueError("no room on the screen")

    model, tiny = models(kind), KINDS[kind]
    runs = [
        sample(attach(model, fast(), on_step=on_step), tiny, SIZE, steps=16, cfg=1.0)
        for on_step in (None, broken)
    ]
    assert torch.equal(*runs)
    assert any("no room on the screen" in message for message in log_messages())


@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_sde", "dpmpp_2m"])
def test_evaluations_within_a_step_are_told_at_their_own_noise_level(sd15, sampler):
    """Percents that leave nothing out have each level read, so they show what else is taken."""
    runs = [
        from_noise(attach(sd15, fast(**span)), sampler=sampler, scheduler="simple")
        for span in ({}, {"end_percent": 0.9999})
    ]
    assert torch.equal(*runs)


@pytest.mark.parametrize("kind", ["sd15", "flux"])
@pytest.mark.parametrize("level", [0.0, 1.0])
def test_a_schedule_without_steps_gives_back_the_latent(models, kind, level):
    expected, result = (
        sample(model, KINDS[kind], picture=2.0, sigmas=torch.tensor([level]))
        for model in (models(kind), attach(models(kind), fast()))
    )
    assert torch.equal(result, expected)


def test_a_sampling_of_another_node_is_asked_for_percents_only_where_they_count(sd15):
    class Odd(type(sd15.get_model_object("model_sampling"))):
        percent_to_sigma = property()

    patched = attach(sd15, fast())
    expected, odd = from_noise(patched), copy.copy(sd15.get_model_object("model_sampling"))
    odd.__class__ = Odd
    patched.add_object_patch("model_sampling", odd)
    try:
        assert torch.equal(from_noise(patched), expected)
    finally:
        # The host leaves it on the model, which other tests share, until another one is loaded.
        patched.unpatch_model()
    assert not isinstance(sd15.model.model_sampling, Odd)
