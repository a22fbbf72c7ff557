"""The attach to real ComfyUI models: what merges, what is left alone, what is left behind."""

import re
from types import MethodType

import comfy.ldm.modules.attention as host_attention
import comfy.model_management
import pytest
import torch
from comfy.k_diffusion import sampling as samplers
from comfy.ldm.modules.attention import BasicTransformerBlock
from comfy.patcher_extension import WrappersMP
from common import ALL_MODULES, ONLY_KEYS, Shuffle, input_lengths, relative_error
from host import (
    compiled,
    keys_only,
    merging,
    needs,
    no_free_memory,
    overridden,
    preset,
    sample,
    with_override,
)
from models import comfyui
from models.comfyui import KINDS, UNETS
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter

from tome_nodes import reasons
from tome_nodes.comfyui import attachment, step_count
from tome_nodes.comfyui.attachment import attach, detach, last_run
from tome_nodes.comfyui.step_count import StepCount, noise_level
from tome_nodes.merging import engine, key_weights
from tome_nodes.merging.key_weights import Capabilities
from tome_nodes.ops.clock import Clock
from tome_nodes.run.span import Span
from tome_nodes.settings.policy import PLAIN
from tome_nodes.strategies.plan import Grid, Plan
from tome_nodes.strategies.window import WindowStrategy


def untouched_and_followed(model, config):
    """The model attached to without and with a report, which follows each block."""
    return [
        attach(model, config, wants_details=lambda wanted=wanted: wanted)
        for wanted in (False, True)
    ]


def sample_tiny(model, kind, steps=2, **options):
    """Sample with a tiny UNet; that of videos has its frames in the batch."""
    batch = 3 if kind == "svd" else 1
    return comfyui.sample(model, UNETS[kind], (12, 16), steps=steps, batch=batch, **options)


@pytest.mark.parametrize(
    ("kind", "scope", "words"),
    [
        ("sd15", "module", "3/7 blocks (192 -> 96 tokens)"),
        ("sd2", "module", "3/7 blocks (192 -> 96 tokens)"),
        ("sdxl", "module", "3/11 blocks (48 -> 24 tokens)"),
        ("sdxl_refiner", "module", "12/16 blocks (48 -> 24 tokens)"),
        ("sdxl", "stack", "11/11 blocks (48 -> 24 tokens x3, 12 -> 6 tokens x8)"),
        # Of levels with as many blocks, the shallowest is enough.
        ("sd15", "stack", "3/7 blocks (192 -> 96 tokens)"),
    ],
)
def test_auto_takes_the_shallowest_level_and_in_scope_stack_that_of_most_blocks(
    models, log_messages, kind, scope, words
):
    sample_tiny(attach(models(kind), merging(scope=scope)), kind, steps=1)
    assert log_messages()[-1].startswith(f"[ToMe] merged {words}")


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, [96, 96, 192, 192]),
        ({"attn_tokens": "k,v"}, [192, 96, 192, 192]),
        ({"merge_attn": False, "merge_crossattn": True}, [192, 192, 96, 192]),
        ({"merge_attn": False, "merge_mlp": True}, [192, 192, 192, 96]),
        ({"scope": "stack"}, [96, 96, 96, 96]),
        ({"scope": "stack", "merge_attn": False}, [96, 96, 96, 96]),
        ({"strategy": "window", "ratio": 0.75}, [48, 48, 192, 192]),
        ({"strategy": "cluster"}, [96, 96, 192, 192]),
        ({"strategy": "cluster", "ratio": 0.25, **ALL_MODULES}, [144, 144, 144, 144]),
        ({"ratio": 0.25, "attn_tokens": "k,v", "merge_mlp": True}, [192, 144, 192, 144]),
    ],
    ids=str,
)
def test_what_runs_on_merged_tokens(sd15, settings, lengths):
    """The queries, keys, text queries and feed-forward of a block."""
    block = sd15.model.diffusion_model.input_blocks[1][1].transformer_blocks[0]
    layers = block.attn1.to_q, block.attn1.to_k, block.attn2.to_q, block.ff.net
    with input_lengths(*layers) as actual:
        sample(attach(sd15, merging(**settings)), steps=1)
    assert actual == lengths


@pytest.mark.parametrize(
    ("settings", "steps", "words"),
    [
        (
            {"ratio": 0.6, "ratio_end": 0.4},
            5,
            "merged 6/6 blocks (192 -> 77-116 tokens), 5/5 steps, ratio 0.60 to 0.40",
        ),
        ({"ratio": 0.6, "ratio_end": 0.0}, 1, "(192 -> 77 tokens)"),
        ({"ratio": 0.0, "ratio_end": 0.5}, 3, "2/3 steps"),
        ({"strategy": "window", "ratio_end": 0.0}, 3, "2/3 steps"),
        ({"ratio": 0.9}, 1, "(192 -> 48 tokens), 1/1 steps, ratio 0.90 capped at 0.75"),
        ({"start_percent": 0.3, "end_percent": 0.7}, 4, ", 2/4 steps,"),
    ],
    ids=str,
)
def test_steps_that_merge_and_their_ratio(sd15, log_messages, settings, steps, words):
    sample(attach(sd15, merging(**settings)), steps=steps)
    (line,) = log_messages()
    assert words in line


def test_start_percent_06_is_the_last_two_fifths_of_the_training(sd15, log_messages):
    """Where the summary that strategy cluster follows merges."""
    sampling, config = sd15.model.model_sampling, merging(strategy="cluster", start_percent=0.6)
    span = Span(config, sampling.percent_to_sigma)
    merges = [span.covers(level) for level in sampling.sigmas]
    assert merges == [True] * 400 + [False] * 600
    sample(attach(sd15, config), steps=20)
    (line,) = log_messages()
    assert "(192 -> 96 tokens), 8/20 steps, ratio 0.50, cluster" in line


@pytest.mark.newest_only
@pytest.mark.parametrize(
    ("config", "way", "has_cudnn", "graphs"),
    [
        (preset("balanced"), "whole", True, 1),
        (preset("balanced"), "blocks", False, 3),
        # Whole stacks merge at the only level, too.
        (preset("fast", policy=PLAIN), "whole", False, 1),
    ],
    ids=["balanced", "balanced by block", "fast"],
)
def test_a_compiled_model_asks_nothing_of_a_gpu_and_compiles_nothing_later(
    shallow, fresh_compiler, monkeypatch, config, way, has_cudnn, graphs
):
    """What the device can do, and its attention, is known before: asking would break the graph.

    Compiled whole or block by block, the plain model has one graph, or one for each of 3 blocks.
    """

    def only_before(answer):
        def ask(*arguments):
            if torch.compiler.is_compiling():
                raise AssertionError("a question in a compiled model")
            return answer(*arguments)

        return ask

    capable = Capabilities(flash=True, cudnn=has_cudnn)
    for module in (engine, key_weights):
        monkeypatch.setattr(module, "capabilities", only_before(lambda *_: capable))
    monkeypatch.setattr(key_weights, "try_out", only_before(key_weights.try_out))
    cuda = torch.backends.cuda
    for module, name in (
        *((torch.cuda, name) for name in ("get_device_properties", "get_device_capability")),
        *((cuda, name) for name in ("is_flash_attention_available", "cudnn_sdp_enabled")),
    ):
        monkeypatch.setattr(module, name, only_before(getattr(module, name)))
    steps = 3
    expected = sample_tiny(attach(shallow, config), "sd15", steps)
    names = [name for name, _ in shallow.model.named_modules()]
    blocks = [name for name in names if re.search(r"transformer_blocks\.\d+$", name)]
    counter, after_steps = CompileCounter(), []
    options = {"keys": blocks} if way == "blocks" else {}
    model = compiled(attach(shallow, config), backend=counter, **options)

    def count(*_):
        after_steps.append(counter.frame_count)

    assert relative_error(sample_tiny(model, "sd15", steps, callback=count), expected) < 1e-5
    assert after_steps[-1] == graphs
    assert {*after_steps} == {graphs}


@pytest.mark.newest_only
def test_a_compiled_model_weighs_keys_in_an_attention_that_the_pack_does_not_know(
    shallow, fresh_compiler, monkeypatch, log_messages
):
    @host_attention.wrap_attn
    def attention_of_the_future(q, k, v, heads, mask=None, **kwargs):
        return host_attention.attention_basic(q, k, v, heads, mask=mask, **kwargs)

    for name in ("optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(host_attention, name, attention_of_the_future)
    merged = attach(shallow, preset("balanced"))
    expected = sample_tiny(merged, "sd15")
    counter = CompileCounter()
    actual = sample_tiny(compiled(merged, backend=counter), "sd15")
    assert relative_error(actual, expected) < 1e-5
    assert counter.frame_count == 1
    assert not [line for line in log_messages() if "weigh as one token" in line]


@pytest.mark.newest_only
def test_fast_compiles_to_one_graph_where_keys_merge_at_one_level_and_stacks_at_another(
    models, fresh_compiler
):
    model, tiny, counter = models("sdxl"), UNETS["sdxl"], CompileCounter()
    merged = attach(model, preset("fast", max_downsample=4))
    expected = comfyui.sample(merged, tiny, (24, 32), steps=3)
    by_before = last_run(merged).counts.merged
    assert {len(blocks) for blocks in by_before.values()} == {3, 8}
    actual = comfyui.sample(compiled(merged, backend=counter), tiny, (24, 32), steps=3)
    assert relative_error(actual, expected) < 1e-5
    assert counter.frame_count == 1


@pytest.mark.parametrize("settings", [{"scope": "stack"}, ONLY_KEYS], ids=["stack", "keys"])
@pytest.mark.parametrize(("text", "has_override"), [(20, True), (24, False), (96, True)])
def test_blocks_that_run_untouched_weigh_keys_as_blocks_that_are_followed(
    models, settings, text, has_override
):
    """A prompt may have as many tokens as there are slots; its attention weighs nothing."""
    tiny, model, seen = UNETS["sdxl"], models("sdxl"), []

    def theirs(func, q, k, v, heads, mask=None, **kwargs):
        seen.append(mask is not None)
        return func(q, k, v, heads, mask=mask, **kwargs)

    if has_override:
        model = with_override(model, theirs)
    prompts = [comfyui.conditioning(tiny, seed, text) for seed in (5, 6)]
    options = {"size": (24, 32), "steps": 2, "prompts": prompts}
    config = merging(strategy="window", max_downsample=4, **settings)
    untouched, followed = untouched_and_followed(model, config)
    expected = comfyui.sample(followed, tiny, **options)
    masks = [*seen]
    seen.clear()
    assert torch.equal(comfyui.sample(untouched, tiny, **options), expected)
    counts = [last_run(patched).counts for patched in (untouched, followed)]
    assert counts[0].merged == counts[1].merged
    assert counts[0].unweighted_reasons == counts[1].unweighted_reasons
    merged = {before: [*blocks.values()] for before, blocks in counts[0].merged.items()}
    assert merged == {192: [{96}] * 3, 48: [{24}] * 8}
    assert masks == seen and any(masks) == has_override


@pytest.mark.parametrize("has_reference", [True, False])
def test_a_block_that_other_code_replaced_attends_to_what_it_asks_for(has_reference):
    """As nodes do that add tokens of a reference; they may leave out the options, too."""

    def forward(self, x, context=None, transformer_options=None):
        n = self.norm1(x)
        keys = torch.cat([n, 3 * n.flip(1)], 1) if has_reference else None
        x = x + self.attn1(n, context=keys)
        x = x + self.attn2(self.norm2(x), context=context)
        return x + self.ff(self.norm3(x))

    # ComfyUI leaves a method on each module that was replaced, so no other test may use the model.
    theirs = comfyui.build(comfyui.sd15(1))
    for name, module in theirs.model.named_modules():
        if isinstance(module, BasicTransformerBlock):
            theirs.add_object_patch(f"{name}.forward", MethodType(forward, module))
    config = merging(strategy="window", **ONLY_KEYS)
    untouched, followed = (sample(m, steps=2) for m in untouched_and_followed(theirs, config))
    assert torch.equal(untouched, followed)
    error = relative_error(untouched, sample(theirs, steps=2))
    assert error < 1e-6 if has_reference else error > 1e-6


def test_a_later_block_without_self_attention_is_not_counted():
    """SDXL's tiny UNet has 11 blocks in 7 stacks."""

    def forward(self, x, context=None, transformer_options=None):
        return x + self.ff(self.norm3(x))

    theirs = comfyui.build(UNETS["sdxl"])
    for name, module in theirs.model.named_modules():
        if isinstance(module, BasicTransformerBlock) and not name.endswith(".0"):
            theirs.add_object_patch(f"{name}.forward", MethodType(forward, module))
    config = merging(strategy="window", max_downsample=4, **ONLY_KEYS)
    for patched in untouched_and_followed(theirs, config):
        comfyui.sample(patched, UNETS["sdxl"], (24, 32), steps=1)
        counts = last_run(patched).counts
        assert counts.merged_blocks == 7


@pytest.mark.parametrize(
    ("config", "plans"),
    [
        (preset("balanced", max_downsample=4), 7),
        (preset("fast", max_downsample=4), 7),
        (keys_only(max_downsample=4), 11),
    ],
    ids=["balanced", "fast", "custom"],
)
def test_under_presets_one_plan_serves_all_blocks_of_a_stack(models, monkeypatch, config, plans):
    """SDXL's tiny UNet has 11 blocks in 7 stacks."""
    made, plan = [], WindowStrategy.plan

    def counted(self, features, grid, ratio):
        made.append(grid)
        return plan(self, features, grid, ratio)

    monkeypatch.setattr(WindowStrategy, "plan", counted)
    patched = attach(models("sdxl"), config)
    comfyui.sample(patched, UNETS["sdxl"], (24, 32), steps=1)
    assert last_run(patched).counts.merged_blocks == 11
    # The device is tried on another grid.
    assert len([grid for grid in made if grid in (Grid(12, 16), Grid(6, 8))]) == plans


def test_the_wrappers_of_others_stay(sd15):
    theirs = sd15.clone()
    theirs.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "other", lambda run, *args: run(*args))
    patched = attach(attach(theirs, merging(ratio=0.7)), merging(ratio=0.3))
    for model, wrappers in (patched, 2), (detach(patched), 1), (attach(sd15, merging(ratio=0)), 0):
        assert len(model.get_all_wrappers(WrappersMP.APPLY_MODEL)) == wrappers


@pytest.mark.parametrize("kind", ["sd15", "flux"])
def test_cond_and_uncond_merge_alike_in_one_batch_or_two(models, monkeypatch, kind):
    tiny, model = KINDS[kind], models(kind)
    patched = attach(model, merging())
    batches = []
    with model.model.diffusion_model.register_forward_pre_hook(
        lambda _, inputs: batches.append(len(inputs[0]))
    ):
        together = comfyui.sample(patched, tiny)
        # Prompts of two lengths cannot share a batch.
        monkeypatch.setattr(comfy.model_management, "get_free_memory", no_free_memory)
        apart = comfyui.sample(patched, tiny)
    assert batches == [2, 2, 1, 1, 1, 1]
    assert relative_error(apart, together) < 1e-4


@pytest.mark.parametrize(
    ("size", "line"),
    [
        ((7, 9), "merged 11/11 blocks (63 -> 32 tokens x5, 20 -> 10 tokens x6), "),
        ((13, 16), "merged 11/11 blocks (208 -> 104 tokens x5, 56 -> 28 tokens x6), "),
        (
            (1, 24),
            "nothing merged: a feature map of 1x12 tokens holds no cell of sy=2 by sx=2; "
            "take a larger picture",
        ),
        ((33, 5), "merged 11/11 blocks (165 -> 83 tokens x5, 51 -> 26 tokens x6), "),
    ],
    ids=str,
)
def test_odd_sizes(sd15_of, log_messages, size, line):
    model = sd15_of(2)
    plain = sample(model, size=size, steps=1)
    patched = attach(model, merging(max_downsample=2, **ALL_MODULES))
    assert relative_error(sample(patched, size=size, steps=1), plain) < 1
    assert log_messages()[-1].startswith(f"[ToMe] {line}")
    lossless = attach(model, merging(max_downsample=8, **ALL_MODULES), Shuffle)
    assert relative_error(sample(lossless, size=size, steps=1), plain) < 1e-5


def reads(monkeypatch):
    """The noise levels that are read from now on. On a GPU, each would wait for the model."""
    levels = []

    def read(t):
        levels.append(noise_level(t))
        return levels[-1]

    monkeypatch.setattr(step_count, "noise_level", read)
    return levels


@pytest.mark.parametrize(
    ("options", "sampler", "evaluations", "few"),
    [
        ({}, "euler", 4, True),
        ({"ratio_end": 0.2}, "dpmpp_2m", 4, True),
        ({}, "dpmpp_sde", 7, True),
        ({}, "heun", 7, True),
        ({"start_percent": 0.1}, "euler", 4, False),
        ({"end_percent": 0.9}, "euler", 4, False),
        # Its own count is of something else.
        ({"ratio_end": 0.2}, "dpm_fast", 4, False),
    ],
)
def test_the_noise_level_is_read_only_where_needed(
    sd15, monkeypatch, options, sampler, evaluations, few
):
    model, levels = attach(sd15, merging(**options)), reads(monkeypatch)
    sample(model, steps=4, sampler=sampler)
    assert len(levels) == (1 if few else evaluations)
    counts = last_run(model).counts
    assert counts.total_steps == 4 and max(counts.merged_steps) <= 3
    if sampler != "dpm_fast" and not options.keys() & {"start_percent", "end_percent"}:
        assert counts.merged_steps == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "said", [lambda step: None, lambda step: step / 2, lambda step: step % 2, lambda step: step - 1]
)
def test_what_a_sampler_says_of_its_steps_is_used_only_if_it_is_in_order(sd15, monkeypatch, said):
    """Nor does it have to say anything; and times need a clock."""
    model = attach(sd15, merging(ratio_end=0.2))
    expected = sample(model, steps=4)
    steps = last_run(model).counts.merged_steps
    levels = reads(monkeypatch)

    class Odd(StepCount):
        def watching(self, callback):
            own = super().watching(None)
            return lambda step, *others: own(said(step), *others)

    monkeypatch.setattr(attachment, "StepCount", Odd)
    assert torch.equal(sample(model, steps=4), expected)
    assert last_run(model).counts.merged_steps == steps
    assert len(levels) > 1


@pytest.mark.parametrize("without", ["callback", "clock"])
def test_steps_are_known_without_a_callback_or_a_clock(sd15, monkeypatch, without):
    model = attach(sd15, merging(ratio_end=0.2))
    expected = sample(model, steps=4)
    levels, euler = reads(monkeypatch), samplers.sample_euler
    if without == "callback":
        quiet = lambda *args, callback, **others: euler(*args, **others)  # noqa: E731
        monkeypatch.setattr(samplers, "sample_euler", quiet)
    else:
        monkeypatch.setattr(Clock, "can_measure", False, raising=False)
        monkeypatch.setattr(Clock, "__init__", lambda self, _: setattr(self, "_has_events", False))
    assert torch.equal(sample(model, steps=4), expected)
    assert len(levels) == 4


def test_a_second_sampler_at_another_size_starts_afresh(sd15, log_messages):
    patched = attach(sd15, merging())
    small = sample(patched, size=(8, 8))
    sample(patched, size=(12, 20))
    assert torch.equal(sample(patched, size=(8, 8)), small)
    tokens = [line.split(" tokens")[0].split("(")[1] for line in log_messages()]
    assert tokens == ["64 -> 32", "240 -> 120", "64 -> 32"]


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        (
            *({"start_percent": 0.5, "end_percent": 0.5}, "sd15"),
            "start_percent=0.5 to end_percent=0.5 covers no step of this run; widen them",
        ),
        (
            *({"max_downsample": 1}, "sdxl"),
            "max_downsample=1 leaves out every transformer block: this model's start at 2; "
            "set max_downsample to auto under preset custom",
        ),
        ({"ratio": 0.004}, "sd15", "192 tokens are too few for ratio=0.004; raise it"),
        (
            *({"ratio": 0.0, "ratio_end": 0.004}, "sd15"),
            "the ratio is 0 at every step that could merge; raise it",
        ),
        ({"min_tokens": 193}, "sd15", "192 tokens are fewer than min_tokens=193; lower it"),
        (
            *({"min_tokens": 0}, "sd15"),
            "192 tokens are fewer than 256, the least that pays off; leave ToMe out",
        ),
        (
            *({"merge_attn": False}, "sd15"),
            "merge_attn, merge_crossattn and merge_mlp are all off; switch one on",
        ),
    ],
    ids=str,
)
def test_a_run_without_merging_says_why_in_one_warning(models, caplog, settings, kind, reason):
    # They have two levels: what the settings leave out anyway must not pass for the reason.
    model = models(kind)
    steps = 1 if "ratio_end" in settings else 2
    config = merging(**{"min_tokens": 1, **settings})
    merged = sample_tiny(attach(model, config), kind, steps)
    ours = [record for record in caplog.records if record.name == "tome_nodes"]
    assert [(record.levelname, record.getMessage()) for record in ours] == [
        ("WARNING", f"[ToMe] nothing merged: {reason}")
    ]
    assert torch.equal(merged, sample_tiny(model, kind, steps))


def test_steps_aside_on_a_device_that_lacks_an_operation(sd15, log_messages, monkeypatch, untried):
    error = torch.OutOfMemoryError("no room for a small plan")

    def missing(*_):
        raise error

    monkeypatch.setattr(Plan, "merge", missing)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        sample(attach(sd15, merging()), steps=1)
    assert overridden(sd15) == []
    error = NotImplementedError("no such operation here\nand a long explanation")
    assert torch.equal(sample(attach(sd15, merging())), sample(sd15))
    assert log_messages() == [
        f"[ToMe] nothing merged: the device {sd15.load_device} cannot do it: "
        "NotImplementedError: no such operation here; leave ToMe out"
    ]


def test_text_as_context_of_self_attention_is_never_merged(models):
    tiny, model = UNETS["x4_upscaler"], models("x4_upscaler")
    block = model.model.diffusion_model.input_blocks[3][1].transformer_blocks[0]
    assert block.disable_self_attn
    with input_lengths(block.attn1.to_q, block.attn1.to_k) as lengths:
        # A grid of 4x5 has as many tokens as the text.
        comfyui.sample(attach(model, merging()), tiny, (8, 10), steps=1)
    assert lengths == [10, comfyui.TEXT]


def replace_attention(model):
    for block in ("input", 1), ("input", 2), ("middle", 0), *(("output", i) for i in range(3)):
        model.set_model_attn1_replace(lambda q, k, v, options: v, *block)


def change_the_batch(model):
    model.set_model_attn2_patch(lambda q, k, v, _: [x.repeat(2, 1, 1) for x in (q, k, v)])
    model.set_model_attn2_output_patch(lambda n, options: n[: len(n) // 2])


@pytest.mark.parametrize(
    ("patch", "settings", "reason"),
    [
        (replace_attention, {}, reasons.ATTENTION_REPLACED),
        (
            *(change_the_batch, {"merge_attn": False, "merge_crossattn": True}),
            reasons.ATTENTION_MASKED,
        ),
    ],
)
def test_steps_aside_where_another_node_changes_attention(
    sd15, log_messages, patch, settings, reason
):
    theirs = sd15.clone()
    patch(theirs)
    assert torch.equal(sample(attach(theirs, merging(**settings))), sample(theirs))
    named = reasons.named(reason, ["test_comfyui"])
    assert log_messages() == [f"[ToMe] nothing merged: {named}"]


def test_other_patches_see_every_token_and_may_add_keys(sd15):
    lengths = []

    def add_keys(q, k, v, options):
        lengths.append(q.shape[1])
        return q, torch.cat([k, k[:, :10]], 1), torch.cat([v, v[:, :10]], 1)

    theirs = sd15.clone()
    theirs.set_model_attn1_patch(add_keys)
    plain = sample(theirs, steps=1)
    lossless = sample(attach(theirs, merging(), Shuffle), steps=1)
    assert relative_error(lossless, plain) < 1e-5
    assert 1e-3 < relative_error(sample(attach(theirs, merging()), steps=1), plain) < 1
    assert set(lengths) == {192}
    # Keys of as many tokens merge, too.
    theirs = sd15.clone()
    theirs.set_model_attn1_patch(lambda q, k, v, options: (q, k * 1.5, v * 0.5))
    lossless = sample(attach(theirs, merging(), Shuffle), steps=1)
    assert relative_error(lossless, sample(theirs, steps=1)) < 1e-5
    layer = sd15.model.diffusion_model.input_blocks[1][1].transformer_blocks[0].attn1.to_k
    with input_lengths(layer) as lengths:
        sample(attach(theirs, merging()), steps=1)
    assert lengths == [96]


def test_saved_weights_are_those_of_the_source(sd15, tmp_path):
    from comfy_extras.nodes_model_merging import save_checkpoint

    saved = []
    for name, model in ("plain", sd15), ("patched", attach(sd15, merging())):
        sample(model, steps=1)
        save_checkpoint(model, filename_prefix=name, output_dir=str(tmp_path))
        saved.append(load_file(tmp_path / f"{name}_00001_.safetensors"))
    plain, patched = saved
    assert list(patched) == list(plain)
    assert all(torch.equal(patched[name], plain[name]) for name in plain)


def test_weights_that_stay_offloaded_work_under_the_patch(sd15_from_file):
    model, options = sd15_from_file, {"channels": 768, "steps": 1}
    expected = sample(model, **options)
    patched = attach(model, merging(), Shuffle)
    patched.unpatch_model(patched.offload_device)
    patched.load(patched.load_device, lowvram_model_memory=1)
    try:
        offloaded = [m for m in model.model.modules() if getattr(m, "comfy_cast_weights", False)]
        assert offloaded
        assert relative_error(sample(patched, **options), expected) < 1e-5
    finally:
        patched.detach()


def test_a_deep_clone_merges_in_its_own_weights(sd15_from_file, log_messages):
    model, options = sd15_from_file, {"channels": 768, "steps": 1}
    patched = attach(model, merging())
    expected = sample(patched, **options)
    needs("deep clones", hasattr(patched, "deepclone_multigpu"))
    deep = patched.deepclone_multigpu()
    assert deep.model is not patched.model
    assert torch.equal(sample(deep, **options), expected)
    assert log_messages()[0] == log_messages()[1]
    assert overridden(deep) == overridden(model) == []
