"""What is counted as the work of an evaluation, against PyTorch's own counter."""

import pytest
import torch
from common import AS_FAST
from host import policy_of, preset
from host import sample as sample_sd15
from models.comfyui import KINDS, conditioning, sample
from models.pipelines import inputs, make_unet
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.fidelity.meter import ON_CPU
from benchmarks.others import plan_of_functions
from tome_nodes import reasons
from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.models.unet import UNET
from tome_nodes.merging.evaluation import Observer
from tome_nodes.merging.model import PatchedModel
from tome_nodes.python.diffusers_unets import DiffusersUNets
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import strategy_class
from tome_nodes.strategies.plan import Grid
from tome_nodes.strategies.strategy import Strategy

SIZE, LARGER = (16, 24), (32, 32)


class IdealStrategy(Strategy):
    """Merging at no cost: a fixed stride of the tokens stays, and one expand restores the rest."""

    def plan(self, features, grid, ratio):
        stride = round(1 / (1 - ratio))

        def unmerge(y):
            return y[:, :, None].expand(-1, -1, stride, -1).flatten(1, 2)[:, : grid.tokens]

        slots = -(-grid.tokens // stride)
        return plan_of_functions(features, slots, lambda x: x[:, ::stride], unmerge)


def operations(call):
    counter = FlopCounterMode(display=False, custom_mapping=ON_CPU)
    with counter, torch.no_grad():
        call()
    return counter.get_total_flops()


def multiplications(model, kind, size):
    """Of an evaluation of a model of ComfyUI, without what grows with the text."""

    def run(tokens):
        tiny = KINDS[kind]
        prompts = conditioning(tiny, 5, tokens), conditioning(tiny, 6, tokens)
        return operations(lambda: sample(model, tiny, size, steps=1, cfg=1.0, prompts=prompts))

    return (2 * run(1) - run(2)) / 2


def work_of(record, network):
    patched = PatchedModel(ToMeConfig(), record, network, Observer())
    return record.work(network, patched.blocks)


@pytest.mark.parametrize("kind", ["sd15", "sdxl", "sd2"])
def test_the_work_of_an_evaluation(models, kind):
    """The difference between two sizes, which is without what does not depend on the picture."""
    model = models(kind)
    work = work_of(UNET, model.model.diffusion_model)
    counted = [multiplications(model, kind, size) for size in (SIZE, LARGER)]
    expected = [work.of(Grid(*size)) for size in (SIZE, LARGER)]
    assert expected[1] - expected[0] == pytest.approx(counted[1] - counted[0], rel=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_tokens": "k,v"},
        {"attn_tokens": "q,k,v", "max_downsample": 2},
        {"merge_crossattn": True, "merge_mlp": True, "max_downsample": 8},
        {"scope": "stack"},
        AS_FAST,
    ],
)
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_the_work_that_merging_saves(models, kind, settings):
    model, latent = models(kind), Grid(*LARGER)
    config = ToMeConfig(ratio=0.5, min_tokens=1, proportional_attn=False, **settings)
    patched = PatchedModel(config, UNET, model.model.diffusion_model, Observer())
    plain = multiplications(model, kind, LARGER)
    ideal = multiplications(attach(model, config, IdealStrategy), kind, LARGER)
    saved = patched.saved(latent) * UNET.work(patched.model, patched.blocks).of(latent)
    assert saved == pytest.approx(plain - ideal, rel=1e-9)
    assert saved > 0


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        ("sd15", "balanced", (33, 47)),
        ("sd15", "fast", (36, 44)),
        ("sdxl", "balanced", (52, 38)),
        ("sdxl", "fast", (33, 47)),
    ],
    ids=str,
)
def test_the_work_that_a_preset_saves_at_any_size(models, kind, name, size):
    """With the plans of a real run; the work of making them does not count."""
    config = preset(name)
    model, making = models(kind), []

    class Uncounted(strategy_class(config)):
        def plan(self, *args):
            with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
                plan = super().plan(*args)
            making.append(counter.get_total_flops())
            return plan

    patched = PatchedModel(config, UNET, model.model.diffusion_model, Observer())
    plain = multiplications(model, kind, size)
    attached = attach(model, config, Uncounted)
    # The first run tries the device, too.
    multiplications(attached, kind, size)
    making.clear()
    merged = multiplications(attached, kind, size)
    # Of two runs that make the same plans, twice the first less the second counted, halved.
    merged -= sum(making) / 4
    saved = patched.saved(Grid(*size)) * UNET.work(patched.model, patched.blocks).of(Grid(*size))
    assert saved == pytest.approx(plain - merged, rel=1e-9)
    assert saved > 0


def test_the_work_of_a_unet_of_diffusers():
    unet = make_unet()
    work = work_of(DiffusersUNets.family, unet)

    def counted(size):
        def run(tokens):
            given = inputs(unet, batch=1, grid=size)
            given["encoder_hidden_states"] = given["encoder_hidden_states"][:, :tokens]
            return operations(lambda: unet(timestep=500, **given))

        return (2 * run(1) - run(2)) / 2

    difference = counted(LARGER) - counted(SIZE)
    assert work.of(Grid(*LARGER)) - work.of(Grid(*SIZE)) == pytest.approx(difference, rel=1e-9)


@pytest.mark.parametrize(("least", "merges"), [(0.0, True), (0.9, False)])
def test_a_preset_that_saves_next_to_nothing_merges_nothing(sd15, log_messages, least, merges):
    config = preset("balanced", policy=policy_of("balanced", least_saved=least))
    patched = attach(sd15, config)
    same = torch.equal(sample_sd15(patched, (16, 16)), sample_sd15(sd15, (16, 16)))
    assert same != merges
    counted = PatchedModel(config, UNET, sd15.model.diffusion_model, Observer())
    why = reasons.saves_little(counted.saved(Grid(16, 16)), 0.9, "").why
    (line,) = log_messages()
    assert (f"nothing merged: {why}; " in line) != merges
