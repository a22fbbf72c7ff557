"""Shallow steps of UNets: the outermost blocks run on the true latent, the others go on."""

import copy
from functools import partial
from itertools import product

import comfy.model_management
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy.samplers import calculate_sigmas
from common import planned, relative_error
from compatibility import table
from compatibility.neighbours import ALL, BY_NAME
from compatibility.table import alone, model_of
from host import compiled, fast, no_free_memory, overridden, preset
from models.comfyui import KINDS, UNETS, build, conditioning, sample
from test_kjnodes_compile import Compiled, Graphs

from benchmarks.patches import Control
from tome_nodes import reasons
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.comfyui.merging_part import MergingPart
from tome_nodes.comfyui.shallow_call import shallow_control, shallow_options
from tome_nodes.merging.model_run import ModelRun
from tome_nodes.report.pages import in_words
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.skipping import shallow_run
from tome_nodes.skipping.features import Features
from tome_nodes.skipping.plan import FIRST, LEAST_OF_THREE, whole_evaluations

SIZE = 32, 32
CACHES = "EasyCache", "LazyCache"
MEETS = [each.name for each in ALL if not each.is_slow and each.name not in CACHES]
"""The other nodes beside which steps are shallow."""
PLANNED = {*range(20)} - planned(20, ends=3.0)
WITHOUT_GRAIN = PLANNED - {18}


def run(model, steps=20, kind="sdxl", **options):
    return sample(model, KINDS[kind], SIZE, steps=steps, **{"cfg": 4.0, **options})


def shallow_of(patched):
    return last_run(patched).counts.shallow_steps


@pytest.fixture
def sdxl(models):
    return models("sdxl")


@pytest.fixture
def gaps(monkeypatch):
    """Runs every evaluation whole, and again as a shallow one with its own deep features.

    The gaps are the relative errors of the second answers.
    """
    found, seen = [], []
    evaluate, watched = MergingPart.evaluate, ModelRun.evaluate_watched

    def noted(self, model, shape, conditions, t, options, call):
        seen.append((conditions["control"], options))
        return evaluate(self, model, shape, conditions, t, options, call)

    def twice(self, call, evaluation, deep, *others):
        answer, came = watched(self, call, evaluation, deep, *others)
        control, options = seen[-1]
        blocks = len(self.model.model.output_blocks)
        own = partial(call, shallow_options(options, blocks), shallow_control(control, blocks))
        other = self.evaluate_shallow(own, evaluation, deep, came.clone())
        found.append(relative_error(other, answer))
        return answer, came

    monkeypatch.setattr(MergingPart, "evaluate", noted)
    monkeypatch.setattr(ModelRun, "evaluate_watched", twice)
    monkeypatch.setattr(Features, "at", lambda *_: None)
    # Neighbours are met in runs that are short.
    monkeypatch.setattr(shallow_run, "shortest", lambda *_: 1)
    return found


@pytest.mark.parametrize(
    ("kind", "merges"),
    [
        *product(["sd15", "sdxl", "sdxl_refiner"], [True, False]),
        *[("svd", True), ("x4_upscaler", True)],
    ],
)
def test_with_its_own_deep_features_a_shallow_evaluation_is_the_whole_one(
    models, gaps, kind, merges
):
    config = fast() if merges else ToMeConfig(ratio=0.6, forecast=True, merge_attn=False)
    model = models(kind)
    result = run(attach(model, config), 5, kind)
    assert gaps == [0.0] * len(gaps) and len(gaps) >= 5
    if not merges:
        assert torch.equal(result, run(model, 5, kind))
    assert overridden(model) == []


@pytest.mark.parametrize("name", MEETS)
def test_that_holds_beside_other_nodes(gaps, name):
    """Those that change sizes or add to the deep blocks, too: all of that is in the features."""
    neighbour = BY_NAME[name]
    if isinstance(why := alone("sdxl", neighbour), str):
        pytest.skip(why)
    table.run(neighbour, neighbour.patch(attach(model_of("sdxl"), fast()), "sdxl"), "sdxl")
    assert gaps
    assert max(gaps) < 1e-5


class ForEachBlock(Control):
    """A ControlNet or an adapter that adds to every block, in lists as the host makes them."""

    def get_control(self, x, t, *_):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(1))
        return {
            name: [draw(len(x), *shape).to(x) for shape in shapes]
            for name, shapes in self.adds.items()
        }


@pytest.fixture
def shapes(sdxl):
    """The shapes of what a ControlNet and an adapter add to each block of a UNet."""
    network, inputs, middle = sdxl.model.diffusion_model, [], []
    hooks = [
        *(
            block[-1].register_forward_hook(lambda _, __, h: inputs.append(h.shape[1:]))
            for block in network.input_blocks
        ),
        network.middle_block[-1].register_forward_hook(lambda _, __, h: middle.append(h.shape[1:])),
    ]
    run(sdxl, 1, cfg=1.0)
    for hook in hooks:
        hook.remove()
    return {
        "ControlNet": {"output": inputs, "middle": middle},
        # The host takes them from the end, and the first is for the first block.
        "adapter": {"input": inputs[::-1], "middle": []},
    }


def controlled(control):
    tiny = UNETS["sdxl"]
    ((text, options),) = conditioning(tiny, 5)
    control = control.set_cond_hint(None, 1.0, (0.0, 1.0))
    return {"prompts": [[[text, options | {"control": control}]], conditioning(tiny, 6)]}


@pytest.mark.parametrize("kind", ["ControlNet", "adapter"])
def test_that_holds_beside_what_adds_to_every_block(sdxl, gaps, shapes, kind):
    given = controlled(ForEachBlock(shapes[kind]))
    result = run(attach(sdxl, fast()), 5, **given)
    assert gaps == [0.0] * len(gaps) and gaps
    assert relative_error(result, run(attach(sdxl, fast()), 5)) > 1e-3


@pytest.mark.parametrize("kind", ["ControlNet", "adapter"])
def test_what_is_added_to_blocks_that_do_not_run_is_left_out_in_silence(sdxl, caplog, shapes, kind):
    patched = attach(sdxl, fast())
    run(patched, **controlled(ForEachBlock(shapes[kind])))
    assert shallow_of(patched) == PLANNED
    assert [each.message for each in caplog.records if each.name != "tome_nodes"] == []


@pytest.mark.parametrize("name", MEETS)
def test_kept_features_go_on_beside_other_nodes(monkeypatch, name):
    neighbour = BY_NAME[name]
    if isinstance(why := alone("sdxl", neighbour), str):
        pytest.skip(why)
    monkeypatch.setattr(shallow_run, "shortest", lambda *_: 1)
    monkeypatch.setattr(shallow_run, "whole_evaluations", lambda *_: range(FIRST))
    patched = neighbour.patch(attach(model_of("sdxl"), fast()), "sdxl")
    assert table.run(neighbour, patched, "sdxl").isfinite().all()


@pytest.mark.parametrize(
    ("sampler", "shallow"),
    [
        ("euler", PLANNED),
        ("euler_cfg_pp", PLANNED),
        ("dpmpp_3m_sde", PLANNED),
        ("dpmpp_2m_sde", WITHOUT_GRAIN),
    ],
)
def test_the_planned_steps_are_shallow_and_said_to_be(sdxl, log_messages, sampler, shallow):
    patched = attach(sdxl, fast())
    run(patched, sampler=sampler)
    assert shallow_of(patched) == shallow
    assert f", shallow {len(shallow)}/20 steps, " in log_messages()[-1]
    assert f"shallow in {len(shallow)} of 20 steps" in in_words(last_run(patched))[0]


def test_a_sampler_that_swings_needs_more_steps(sdxl, log_messages):
    patched, steps = attach(sdxl, fast()), LEAST_OF_THREE - 1
    run(patched, steps, sampler="dpmpp_3m_sde")
    assert reasons.too_short_for_shallow(15, 16).why in log_messages()[-1]
    run(patched, steps, sampler="dpmpp_3m_sde", scheduler="karras")
    assert "shallow 8/15 steps" in log_messages()[-1]


def test_steps_in_noise_without_a_picture_are_shallow_first(sdxl):
    """As with zero terminal SNR, where noise begins at 4519."""
    model = BY_NAME["ModelSamplingDiscrete"].patch(sdxl, "sdxl")
    sampling = model.get_model_object("model_sampling")
    sigmas = calculate_sigmas(sampling, "karras", 20)[:-1]
    whole = whole_evaluations(0.6, (-2 * sigmas.log()).tolist())
    patched = attach(model, fast())
    run(patched, scheduler="karras")
    assert {*range(3, 7)}.isdisjoint(whole)
    assert shallow_of(patched) == {*range(20)} - whole != PLANNED


def test_only_the_outermost_blocks_run_in_a_shallow_step(sdxl):
    network, hooks = sdxl.model.diffusion_model, []
    last = len(network.output_blocks) - 1
    names = "input_blocks.0.0", "input_blocks.1.0", "middle_block.1"
    names += f"output_blocks.{last - 1}.0", f"output_blocks.{last}.0"
    ran = dict.fromkeys(names, 0)
    for name in ran:

        def count(*_, name=name):
            ran[name] += 1

        # Below a layer whose forward is replaced, as its own hooks still run.
        layer = [*network.get_submodule(name).modules()][-1]
        hooks.append(layer.register_forward_hook(count))
    run(attach(sdxl, fast()))
    for hook in hooks:
        hook.remove()
    assert [*ran.values()] == [20, 9, 9, 9, 20]


def test_a_call_whose_conditions_are_evaluated_apart_is_the_same(sdxl, monkeypatch):
    together = run(attach(sdxl, fast()))
    monkeypatch.setattr(comfy.model_management, "get_free_memory", no_free_memory)
    assert relative_error(run(attach(sdxl, fast())), together) < 1e-5


def test_two_prompts_of_a_size_keep_their_own_features(sdxl):
    tiny = UNETS["sdxl"]
    prompts = [*conditioning(tiny, 5), *conditioning(tiny, 7)]
    results = [
        run(attach(sdxl, fast()), prompts=[each, conditioning(tiny, 6)])
        for each in (prompts, prompts[::-1])
    ]
    assert relative_error(*results) < 1e-5


def test_a_prompt_that_changes_in_the_middle_makes_the_next_step_whole(sdxl):
    tiny = UNETS["sdxl"]
    (first,), (second,) = conditioning(tiny, 5), conditioning(tiny, 7)
    parts = [
        [first[0], first[1] | {"start_percent": 0.0, "end_percent": 0.6}],
        [second[0], second[1] | {"start_percent": 0.6, "end_percent": 1.0}],
    ]
    patched = attach(sdxl, fast())
    assert run(patched, prompts=[parts, conditioning(tiny, 6)]).isfinite().all()
    assert shallow_of(patched) < PLANNED
    assert len(PLANNED - shallow_of(patched)) == 1


@pytest.mark.parametrize(
    ("sampler", "shallow"), [("dpmpp_2m_sde", WITHOUT_GRAIN), ("euler_cfg_pp", PLANNED)]
)
def test_a_latent_that_something_else_changed_makes_the_next_step_whole(sdxl, sampler, shallow):
    """As a callback of the host may; here before the first of two shallow steps."""
    assert {16, 17} < shallow

    def callback(step, denoised, latent, total):
        if step == 15:
            latent.copy_(latent.flip(-1))

    patched = attach(sdxl, fast())
    run(patched, sampler=sampler, callback=callback)
    assert shallow_of(patched) == shallow - {16}


def with_guidance_from(model, steps, scale, before):
    """The model with another guidance in its first steps, as nodes set it."""
    seen = []

    def wrapper(executor, x, t, *args, **kwargs):
        if not seen or seen[-1] != float(t[0]):
            seen.append(float(t[0]))
        executor.class_obj.cfg = before if len(seen) <= steps else scale
        return executor(x, t, *args, **kwargs)

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "guidance", wrapper)
    return clone


def test_two_prompts_of_an_area_keep_their_own_features(sdxl):
    """The host gives an area to the negative prompt, too, under the name of the other."""
    tiny = UNETS["sdxl"]
    ((text, options),), negative = conditioning(tiny, 5), conditioning(tiny, 6)
    area = [text, options | {"area": (*SIZE, 0, 0), "set_area_to_bounds": False}]
    results = [
        run(with_guidance_from(attach(sdxl, fast()), 11, 1.0, 4.0), prompts=[[each], negative])
        for each in ([text, options], area)
    ]
    assert 11 in PLANNED
    assert relative_error(*results) < 1e-5


def test_a_prompt_has_features_of_its_own_in_each_of_two_models(sdxl):
    """As where another node guides by a worse model for a part of the run."""
    other = build(KINDS["sdxl"]).model
    for parameter in other.diffusion_model.parameters():
        parameter.data.mul_(1.1)
    calls = []

    def guided(executor, model, conds, *args):
        calls.append(None)
        if len(calls) <= 11:
            other.current_patcher = model.current_patcher
            executor(other, conds, *args)
        return executor(model, conds, *args)

    both = attach(sdxl, fast())
    both.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "guided", guided)
    assert 11 in PLANNED
    assert torch.equal(run(both), run(attach(sdxl, fast())))


def test_a_prompt_that_comes_back_makes_both_whole(sdxl, monkeypatch):
    """Where memory is short, the host calls the model for each prompt."""
    network, calls = sdxl.model.diffusion_model, []
    monkeypatch.setattr(comfy.model_management, "get_free_memory", no_free_memory)
    assert {16, 17} < PLANNED
    patched = with_guidance_from(attach(sdxl, fast()), 16, 4.0, 1.0)
    begin = network.register_forward_pre_hook(lambda *_: calls.append("shallow"))
    whole = (
        network.middle_block[0]
        .in_layers[0]
        .register_forward_hook(lambda *_: calls.__setitem__(-1, "whole"))
    )
    with begin, whole:
        run(patched)
    assert calls[:16].count("shallow") == len(PLANNED & {*range(16)})
    # The host begins with the prompt that came back.
    assert calls[16:20] == ["whole", "whole", "shallow", "shallow"]


@pytest.mark.parametrize("moves", [False, True])
def test_features_belong_to_their_window(sdxl, moves):
    """Other nodes cut a batch of frames into windows, which may move from step to step."""
    steps = []

    def windows(executor, model, conds, x, timestep, options):
        if not steps or steps[-1] != float(timestep[0]):
            steps.append(float(timestep[0]))
        frames = [(index + moves * len(steps)) % len(x) for index in range(len(x))]
        sums = [torch.zeros_like(x) for _ in conds]
        for window in frames[:3], frames[3:]:
            parts = executor(model, conds, x[window], timestep[window], options)
            for whole, part in zip(sums, parts, strict=True):
                whole[window] = part
        return sums

    model = sdxl.clone()
    model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "windows", windows)
    patched = attach(model, fast())
    run(patched, batch=5)
    assert shallow_of(patched) == (set() if moves else PLANNED)


@pytest.mark.parametrize("name", CACHES)
def test_beside_a_cache_that_skips_steps_all_are_whole(name):
    neighbour = BY_NAME[name]
    if isinstance(why := alone("sdxl", neighbour), str):
        pytest.skip(why)
    patched = neighbour.patch(attach(model_of("sdxl"), fast()), "sdxl")
    run(patched, 6)
    assert not shallow_of(patched)
    assert last_run(patched).unskipped.reason == reasons.CACHE


def with_wrapper(model, wrapper):
    """The model, whose UNet is called by a wrapper of another node."""
    clone = model.clone()
    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def test_a_node_that_calls_the_model_for_each_prompt_with_the_options_of_both(sdxl):
    def apart(apply_model, given):
        x, t, kinds = given["input"], given["timestep"], given["cond_or_uncond"]
        parts = []
        for index in range(len(kinds)):
            own = {
                name: value.chunk(len(kinds))[index] if isinstance(value, torch.Tensor) else value
                for name, value in given["c"].items()
            }
            parts.append(apply_model(x.chunk(len(kinds))[index], t.chunk(len(kinds))[index], **own))
        return torch.cat(parts)

    patched = with_wrapper(attach(sdxl, fast()), apart)
    whole = with_wrapper(attach(sdxl, fast(forecast=False)), apart)
    assert torch.equal(run(patched, 8), run(whole, 8))


def test_a_unet_that_runs_twice_in_a_call_runs_whole(sdxl):
    def twice(executor, x, t, context, y, *args, **kwargs):
        executor(x[:1], t[:1], context[:1], y[:1], *args, **kwargs)
        return executor(x, t, context, y, *args, **kwargs)

    def with_twice(config):
        clone = attach(sdxl, config)
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "twice", twice)
        return clone

    whole = run(with_twice(fast(forecast=False)), 8)
    assert torch.equal(run(with_twice(fast()), 8), whole)


def test_an_evaluation_within_an_evaluation_leaves_nothing(sdxl):
    """A patch of another node calls the model again."""
    calls = []

    def again(h, options):
        if options["block"] == ("input", 0) and not calls:
            calls.append(1)
            inner = {name: value for name, value in options.items() if name != "patches"}
            x, t = torch.zeros(2, 4, *SIZE), torch.ones(2)
            network = sdxl.model.diffusion_model
            text = conditioning(UNETS["sdxl"], 5)[0][0].expand(2, -1, -1)
            y = torch.zeros(2, network.label_emb[0][0].in_features)
            network(x, t, text, y, None, inner)
            calls.clear()
        return h

    patched = attach(sdxl, fast())
    expected = run(patched, 8)
    nested = patched.clone()
    nested.set_model_input_block_patch(again)
    assert run(nested, 8).isfinite().all()
    assert overridden(sdxl) == []
    assert torch.equal(run(patched, 8), expected)


def test_options_that_hold_a_run_may_be_copied(sdxl):
    def copied(apply_model, given):
        own = copy.deepcopy(given["c"].pop("transformer_options"))
        return apply_model(given["input"], given["timestep"], transformer_options=own, **given["c"])

    patched = attach(sdxl, fast())
    expected = run(patched, 8)
    assert torch.equal(run(with_wrapper(patched, copied), 8), expected)


@pytest.mark.parametrize(
    ("sampler", "evaluations", "without_grain"),
    [("heun", 2, 0), ("dpm_2", 2, 0), ("dpmpp_sde", 2, 1), ("lcm", 1, 1)],
)
def test_evaluations_are_counted_whatever_the_sampler(sdxl, sampler, evaluations, without_grain):
    answers = []
    patched = attach(sdxl, fast())

    def wrapper(executor, *args, **kwargs):
        answers.append(1)
        return executor(*args, **kwargs)

    patched.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "count", wrapper)
    whole = []
    hook = (
        sdxl.model.diffusion_model.middle_block[0]
        .in_layers[0]
        .register_forward_hook(lambda *_: whole.append(1))
    )
    with hook:
        assert run(patched, 10, sampler=sampler).isfinite().all()
    assert len(answers) in (10 * evaluations, 10 * evaluations - 1)
    assert len(whole) == len(planned(len(answers))) + without_grain


@pytest.mark.parametrize(("name", "most"), [("balanced", 13), ("fast", 16)])
def test_more_ratio_is_less_work(sdxl, name, most):
    numbers = []
    for ratio in (0.0, 0.1, 0.3, 0.6, 0.95):
        patched = attach(sdxl, preset(name, ratio=ratio))
        result = run(patched)
        numbers.append(0 if ratio == 0 else len(shallow_of(patched)))
        if ratio == 0:
            assert torch.equal(result, run(sdxl))
    assert numbers == sorted(numbers) and numbers[-1] == most


@pytest.mark.newest_only
@pytest.mark.parametrize(("kind", "node"), [("one_level", "the host's"), ("one_level", "KJNodes'")])
def test_a_compiled_model_has_a_graph_for_whole_steps_and_one_for_shallow_steps(
    models, fresh_compiler, kind, node
):
    plain_model, config, graphs = models(kind), fast(), Graphs()
    plain, expected = (run(each, 8, kind) for each in (plain_model, attach(plain_model, config)))
    if node == "the host's":
        model = compiled(plain_model.clone(), backend=graphs)
    else:
        model = Compiled(graphs).patch(plain_model)
    patched = attach(model, config)
    for each, wanted in (patched, expected), (model, plain), (patched, expected), (model, plain):
        assert relative_error(run(each, 8, kind), wanted) < 1e-5
    assert len(shallow_of(patched)) == 3
    assert graphs.frame_count == 3


@pytest.mark.newest_only
def test_another_size_has_two_more_graphs_and_the_first_keeps_its_own(models, fresh_compiler):
    """Without Triton's kernels, each size has a graph of its own for whole steps, too."""
    plain, config, graphs, counts = models("one_level"), fast(), Graphs(), []
    patched = attach(compiled(plain.clone(), backend=graphs), config)
    for size in (32, 32), (40, 48), (32, 32):
        expected, actual = (
            sample(model, KINDS["one_level"], size, steps=6)
            for model in (attach(plain, config), patched)
        )
        assert relative_error(actual, expected) < 1e-5
        assert len(shallow_of(patched)) == 1
        counts.append(graphs.frame_count)
    assert counts == [2, 4, 4]
