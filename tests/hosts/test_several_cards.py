"""Models that several ranks run in step: all skip the same steps, and nobody waits for ever.

There are two ranks of gloo, on a CPU.
"""

import pickle
import threading
from functools import partial
from importlib.util import find_spec

import comfy.sd
import diffusers
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from common import relative_error
from host import needs, preset, sample
from models.checkpoints import write_checkpoint
from rank_cases import (
    BALANCED,
    case_of,
    compiles,
    draws,
    impatient,
    in_parallel,
    in_tensor_parallel,
    runs_out,
    sampled,
    splits,
    trains,
)
from torch import distributed
from two_ranks import TwoRanks

import tome_nodes
from tome_nodes import reasons
from tome_nodes.comfyui.attachment import attach

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)

shards = pytest.mark.skipif(
    not (distributed.is_available() and find_spec("torch.distributed.fsdp._fully_shard")),
    reason="this PyTorch has no fully_shard",
)
splits_sequences = pytest.mark.skipif(
    not hasattr(diffusers, "ContextParallelConfig"),
    reason="this diffusers has no context parallel",
)

ROUNDING = 1e-5


@pytest.fixture(scope="module")
def two_ranks():
    both = TwoRanks()
    yield both
    both.stop()


@shards
def test_all_ranks_of_a_sharded_transformer_forecast_what_each_of_them_would(two_ranks):
    found, lines = two_ranks(draws, "flux", (0, 1), ([12], [12]))
    assert found == [(12, 0.0, pytest.approx(0.1, abs=0.05)), (12, 0.0, 0.0)]
    assert lines[0][-1] == f"[ToMe] nothing was forecast: {reasons.OTHER_RANKS}"
    assert lines[1][-1] == f"[ToMe] nothing was forecast: {reasons.TURNS}"


@shards
def test_equal_prompts_are_forecast_as_on_one_rank(two_ranks):
    found, _ = two_ranks(draws, "flux", (0, 0), ([12], [12]))
    assert [(ran, alone) for ran, _, alone in found] == [(7, 0.0), (7, 0.0)]


@shards
def test_replicas_that_are_not_sharded_forecast_by_themselves(two_ranks):
    found, _ = two_ranks(draws, "flux", (0, 1), ([12], [12]), None, None, (2, 1))
    assert [(ran, alone) for ran, _, alone in found] == [(7, 0.0), (12, 0.0)]


@shards
@pytest.mark.parametrize(("change", "shallow"), [(None, 8), (8, 7)])
def test_all_ranks_of_a_sharded_unet_are_shallow_in_the_same_steps(two_ranks, change, shallow):
    """Of the prompts, only a change counts. Behind one, the rank runs whole, and so do both."""
    found, (lines, _) = two_ranks(draws, "unet", (0, 1), ([20], [20]), change)
    assert [ran for ran, *_ in found] == [20 - shallow] * 2
    assert [alone == 0.0 for *_, alone in found] == [change is None, True]
    assert f"shallow {shallow}/20 steps" in lines[-1]


@shards
@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_runs_of_other_lengths_end(two_ranks, kind):
    """Each rank has as many calls, as a sharded model needs."""
    found, _ = two_ranks(draws, kind, (0, 0), ([20], [12, 8]))
    (first, *_), (second, *_) = found
    assert first == second < 20


@shards
@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_a_run_that_is_interrupted_leaves_nobody_waiting(two_ranks, kind):
    """The rank draws another, whose steps go with the others of the first rank."""
    found, _ = two_ranks(draws, kind, (0, 0), ([12], [12, 6]), None, 5)
    (first, *_), (second, *_) = found
    assert first == second < 12


@shards
@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_a_rank_that_does_not_answer_is_not_waited_for_long(two_ranks, kind):
    """It is not patched here."""
    args = kind, (0, 0), ([12], [12]), None, None, (2,), (0,)
    found, (lines, _) = two_ranks(impatient, draws, *args)
    assert [(ran, plain) for ran, plain, _ in found] == [(12, 0.0), (12, 0.0)]
    why = "not all ranks of this model came to this step within 0.2 s"
    assert [line for line in lines if why in line] == [f"[ToMe] {reasons.alone(why)}"]
    assert str(reasons.OTHER_RANKS) in lines[-1]


@splits_sequences
def test_ranks_that_have_parts_of_one_picture_forecast_the_same_steps(two_ranks):
    (first, second), _ = two_ranks(splits, range(8))
    assert first == second
    assert {*first} == {7, 12}


@splits_sequences
@pytest.mark.parametrize(("kind", "calls"), [("flux", 7), ("wan", 18)])
def test_under_context_parallel_all_is_as_on_one_rank(two_ranks, kind, calls):
    check_parallel(two_ranks(in_parallel, kind), calls)


@shards
def test_under_tensor_parallel_all_is_as_on_one_rank(two_ranks):
    check_parallel(two_ranks(in_tensor_parallel), 7)


def check_parallel(ends, calls):
    found, _ = ends
    assert [ran for ran, *_ in found] == [calls, calls]
    assert max(alone for _, alone, _ in found) < ROUNDING
    (*_, first), (*_, second) = found
    assert (first == second).all()


class Around(torch.nn.Module):
    """Stands for other code's object around a transformer, as in older pipelines of xDiT."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.config, self.cache_context = module.config, module.cache_context

    device = property(lambda self: self.module.device)
    dtype = property(lambda self: self.module.dtype)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.newest_only
def test_a_transformer_in_an_object_of_other_code_runs_as_always(log_messages):
    case = case_of("flux")
    plain = case(12)
    case.pipeline.transformer = Around(case.network)
    tome_nodes.apply_patch(case.pipeline, **BALANCED)
    assert torch.equal(case(12), plain)
    why = reasons.unknown_prediction("Around")
    assert log_messages() == [f"[ToMe] nothing was forecast: {why}"]


def test_gradients_under_ddp_are_the_mean_of_those_of_the_ranks(two_ranks):
    found, _ = two_ranks(trains)
    assert max(found) < ROUNDING


@shards
def test_a_sharded_model_that_is_compiled_forecasts(two_ranks):
    found, _ = two_ranks(compiles)
    assert [ran for ran, _ in found] == [7, 7]
    assert max(alone for _, alone in found) < ROUNDING


def test_what_is_attached_on_each_rank_by_a_pickled_function_agrees(two_ranks):
    """As a node may, whose model is built by actors on several cards."""
    attached = partial(attach, config=preset("balanced"))
    (first, second), lines = two_ranks(sampled, pickle.dumps(attached))
    assert (first == second).all()
    assert [len(each) for each in lines] == [1, 1]
    assert all("forecast 5/12 steps" in line for (line,) in lines)


@shards
def test_a_sharded_model_that_runs_out_of_memory_on_one_rank_is_not_called_again(two_ranks):
    """The other rank waits in a call of the model, as it does without the pack."""
    *_, (_, lines, error) = two_ranks.ends(runs_out)
    assert error.strip().endswith("OutOfMemoryError: on purpose")
    assert not [line for line in lines if "goes on without" in line]


@pytest.fixture
def two_devices(monkeypatch):
    """A CPU and a further one."""
    needs("comfy.multigpu", find_spec("comfy.multigpu") is not None)
    import comfy.model_management

    devices = [torch.device("cpu"), torch.device("cpu", 1)]
    monkeypatch.setattr(
        comfy.model_management, "get_all_torch_devices", lambda exclude_current=False: devices
    )


@pytest.mark.usefixtures("two_devices")
def test_a_unet_on_two_devices_for_both_prompts_does_as_on_one(tmp_path, log_messages):
    """In both orders of the nodes."""
    import comfy.multigpu as multigpu

    path = write_checkpoint(tmp_path / "sd15.ckpt", "sd15", levels=1, unet_only=True, residuals=1)
    unet = comfy.sd.load_diffusion_model(str(path))
    attached = partial(attach, config=preset("balanced"))
    split = partial(multigpu.create_multigpu_deepclones, max_gpus=2, reuse_loaded=True)
    threads = set()

    def run(model):
        def watch(executor, *args, **kwargs):
            threads.add(threading.current_thread())
            return executor(*args, **kwargs)

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "watch", watch)
        return sample(model, size=(8, 8), channels=768, steps=20)

    one = run(attached(unet))
    assert len(threads) == 1
    for model in attached(split(unet)), split(attached(unet)):
        threads.clear()
        assert relative_error(run(model), one) < ROUNDING
        assert len(threads) == 2
    assert ["shallow 8/20 steps" in line for line in log_messages()] == [True] * 3
