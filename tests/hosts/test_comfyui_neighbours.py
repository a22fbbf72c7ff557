"""Beside code that splits, tiles, patches or overrides what the host evaluates."""

import threading

import pytest
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, SpatialTransformer
from comfy.patcher_extension import WrappersMP
from common import DEVICE, EVERYTHING, Shuffle, input_lengths, relative_error
from host import merging, overridden, sample
from models import comfyui
from models.comfyui import UNETS

from tome_nodes.comfyui import step_count
from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.step_count import noise_level
from tome_nodes.settings.config import OPTIONS

scopes = pytest.mark.parametrize("scope", OPTIONS["scope"].choices)


@scopes
def test_parts_of_a_batch_merge(sd15, scope):
    def evaluate(apply, arguments):
        x, t, extras = arguments["input"], arguments["timestep"], arguments["c"]
        results = []
        for rows in slice(0, 3), slice(3, None):
            own = {
                name: value[rows] if torch.is_tensor(value) and len(value) == len(x) else value
                for name, value in extras.items()
            }
            results.append(apply(x[rows], t[rows], **own))
        return torch.cat(results)

    theirs = sd15.clone()
    theirs.set_model_unet_function_wrapper(evaluate)
    expected = sample(theirs, batch=2, steps=2)
    patched = attach(theirs, merging(scope=scope), Shuffle)
    assert relative_error(sample(patched, batch=2, steps=2), expected) < 1e-5


def test_keys_and_values_of_other_nodes_are_left_alone_and_queries_too(sd15):
    layer = sd15.model.diffusion_model.middle_block[1].transformer_blocks[0].attn1.to_q
    theirs = sd15.clone()
    theirs.set_model_attn1_patch(lambda n, *_: (n, torch.cat([n, n], 1), torch.cat([n, n], 1)))
    with input_lengths(layer) as lengths:
        sample(attach(theirs, merging(attn_tokens="k,v")), steps=1)
    assert lengths == [192]


@scopes
def test_a_replaced_attention_takes_only_its_own_block_out(sd15, log_messages, scope):
    theirs = sd15.clone()
    theirs.set_model_attn1_replace(lambda q, k, v, options: v, "middle", 0)
    expected = sample(theirs, steps=1)
    config = merging(scope=scope, merge_mlp=True)
    assert relative_error(sample(attach(theirs, config, Shuffle), steps=1), expected) < 1e-5
    assert log_messages()[-1].startswith("[ToMe] merged 6/6 blocks")
    assert ("module scope in 1 that are patched" in log_messages()[-1]) == (scope != "module")


@pytest.mark.parametrize("index", [0, 1])
def test_a_replaced_attention_takes_its_stack_out_of_stack_scope(models, log_messages, index):
    theirs = models("sdxl").clone()
    # The name that the host prefers has the place of the block in its stack.
    theirs.set_model_attn2_replace(lambda q, k, v, options: q, "input", 5, index)
    patched = attach(theirs, merging(scope="stack", merge_mlp=True), Shuffle)
    merged, expected = (comfyui.sample(m, UNETS["sdxl"], steps=1) for m in (patched, theirs))
    assert relative_error(merged, expected) < 5e-5
    assert "module scope in 1 that are patched" in log_messages()[-1]


def names_of_block_patches():
    """The patches that ComfyUI's transformer blocks ask for."""
    asked = set()

    class Asked(dict):
        def __contains__(self, name):
            asked.add(name)
            return False

        def get(self, name, default=None):
            asked.add(name)
            return default

    transformer = SpatialTransformer(32, 1, 32, context_dim=8)
    options = {"patches": Asked(), "block": ("middle", 0)}
    transformer(torch.zeros(1, 32, 2, 2), torch.zeros(1, 3, 8), transformer_options=options)
    assert {"attn1_patch", "attn2_output_patch"} < asked
    return sorted(asked)


@pytest.mark.parametrize("name", names_of_block_patches())
def test_patches_of_the_inside_of_blocks_see_all_tokens(sd15, log_messages, name):
    seen = set()

    def patch(*arguments):
        seen.add(arguments[0].shape[1])
        return arguments[:3] if len(arguments) == 4 else arguments[0]

    theirs = sd15.clone()
    theirs.set_model_patch(patch, name)
    stacks = sample(attach(theirs, merging(scope="stack")), steps=1)
    assert seen == {192}
    assert log_messages()[-1].endswith("stack scope, module scope in 6 that are patched")
    assert torch.equal(stacks, sample(attach(theirs, merging()), steps=1))


@pytest.mark.parametrize("options", [{}, {"scope": "stack"}], ids=str)
def test_another_thread_may_run_the_unpatched_model_in_the_meantime(sd15, options):
    unet = sd15.model.diffusion_model
    x, text = (torch.randn(2, *shape, device=DEVICE) for shape in ((4, 12, 16), (77, 32)))
    levels, outputs = torch.full((2,), 500.0, device=DEVICE), []

    @torch.no_grad()
    def evaluate():
        outputs.append(unet(x, levels, context=text, transformer_options={}))

    def evaluate_elsewhere(*_):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=evaluate)
            other.start()
            other.join()

    evaluate()
    merged = attach(sd15, merging(**EVERYTHING, **options))
    expected = sample(merged, steps=1)
    block = next(part for part in unet.modules() if isinstance(part, BasicTransformerBlock))
    with block.attn2.register_forward_hook(evaluate_elsewhere):
        actual = sample(merged, steps=1)
    assert len(outputs) == 2
    assert torch.equal(*outputs)
    assert torch.equal(actual, expected)


def test_threads_do_not_wait_for_each_other_to_read_the_noise_level(sd15, monkeypatch):
    """As several GPUs would, where nothing else tells the level."""
    both, answers = threading.Barrier(2, timeout=10), []

    def read(t):
        both.wait()
        return noise_level(t)

    def twice(executor, *args, **kwargs):
        @torch.no_grad()
        def evaluate():
            answers.append(executor(*args, **kwargs))

        other = threading.Thread(target=evaluate)
        other.start()
        evaluate()
        other.join()
        return answers[0]

    monkeypatch.setattr(step_count, "noise_level", read)
    theirs = sd15.clone()
    theirs.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "theirs", twice)
    sample(attach(theirs, merging()), steps=1)
    assert len(answers) == 2 and torch.equal(*answers)


def test_an_evaluation_may_run_within_another(sd15):
    nested = []

    def evaluate(executor, x, t, *rest, **kwargs):
        def again(q, k, v, options):
            if not nested:
                nested.append(None)
                nested.append(executor(x, t, *rest, **kwargs))
            return q, k, v

        rest[3]["patches"] = {"attn2_patch": [again]}
        return executor(x, t, *rest, **kwargs)

    theirs = sd15.clone()
    theirs.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "theirs", evaluate)
    expected = sample(theirs, steps=1)
    nested.clear()
    assert relative_error(sample(attach(theirs, merging(), Shuffle), steps=1), expected) < 1e-5
    assert len(nested) == 2
    assert overridden(sd15) == []


def test_tiles_made_within_the_model_merge_at_their_own_level(sd15, log_messages):
    def tiled(executor, x, *args, **kwargs):
        return torch.cat([executor(tile, *args, **kwargs) for tile in x.split(6, dim=2)], 2)

    theirs = sd15.clone()
    theirs.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "theirs", tiled)
    sample(attach(theirs, merging()), steps=1)
    assert log_messages()[-1].startswith("[ToMe] merged 6/6 blocks (96 -> 48 tokens)")
