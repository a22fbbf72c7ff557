"""What the tests of several cards run on each rank, whose number is the first argument."""

import pickle

import diffusers
import torch
from common import relative_error
from models.pipelines import TEXT, TRANSFORMERS, inputs, lively, make_unet, sd15
from torch import distributed

import tome_nodes
from tome_nodes import ranks

BALANCED = {"preset": "balanced", "ratio": 0.6}

PARTS = {
    *("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    *("ResnetBlock2D", "BasicTransformerBlock"),
}
"""The classes of what is sharded by itself."""


def case_of(kind, seed=0):
    """A pipeline. Under the prompts of seed 1, the answers of a transformer turn back."""
    if kind == "unet":
        case = sd15("one_level")
        case.pipeline.scheduler = diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
        )
    else:
        case = TRANSFORMERS[kind]()
        lively(case.network, of_time=1.0)
    random = torch.Generator().manual_seed(70 + seed)
    for name, value in case.arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            case.arguments[name] = torch.randn(value.shape, generator=random) * (1 + seed)
    return case


def shard(network, shape=(2,)):
    """Shard a network over ranks, and each part of its blocks by itself."""
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in network.modules():
        if type(part).__name__ in PARTS:
            fully_shard(part, mesh=mesh)
    fully_shard(network, mesh=mesh)


def runs_of(network):
    """How often all of a network runs, as a list that grows."""
    ran = []
    inner = network.down_blocks[-1].resnets[0] if hasattr(network, "down_blocks") else network
    inner.register_forward_hook(lambda *_: ran.append(1))
    return ran


def draws(rank, kind, seeds, lengths, change=None, stop=None, shape=(2,), patched=(0, 1)):
    """Runs of a sharded model on each rank.

    Args:
        seeds: of each rank's prompts.
        lengths: the steps of each rank's runs.
        change: after this step, the prompts of rank 1 change.
        stop: after this step, the first run of rank 1 is interrupted.
        patched: the ranks that are.

    Returns:
        How often the model ran, and how far pictures are from those of the plain model, and from
        those of the patched model that is not sharded.
    """
    case = case_of(kind, seeds[rank])
    may_stop = rank == 1 and stop is not None

    def after(_, step, __, given):
        if step == change and rank == 1:
            given["prompt_embeds"] = given["prompt_embeds"] * 1.5
        if may_stop and step == stop:
            raise InterruptedError
        return given

    read = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}

    def drawn():
        nonlocal may_stop
        pictures, may_stop = [], rank == 1 and stop is not None
        for steps in lengths[rank]:
            try:
                pictures.append(case(steps, callback_on_step_end=after, **read))
            except InterruptedError:
                may_stop = False
        return torch.cat(pictures)

    plain = drawn()
    if rank in patched:
        tome_nodes.apply_patch(case.pipeline, **BALANCED)
    alone = drawn()
    shard(case.network, shape)
    ran = runs_of(case.network)
    together = drawn()
    return len(ran), relative_error(together, plain), relative_error(together, alone)


def impatient(rank, function, *args):
    """What a function returns that waits for other ranks hardly at all."""
    ranks.PATIENCE, before = 0.2, ranks.PATIENCE
    try:
        return function(rank, *args)
    finally:
        ranks.PATIENCE = before


def splits(rank, seeds):
    """How often a model runs in each run, whose sequence other code splits.

    So each rank has its part of the latent; in attention, ranks exchange heads.
    """
    from diffusers import ContextParallelConfig

    torch.accelerator.device_count = lambda: 2
    case = two_can_share(case_of("flux"))
    plan = {key: value for key, value in case.network._cp_plan.items() if key != "proj_out"}
    plan[""] = {key: value for key, value in plan[""].items() if key != "hidden_states"}
    case.network.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2), cp_plan=plan)
    tome_nodes.apply_patch(case.pipeline, **BALANCED)
    ran, counts = runs_of(case.network), []
    for seed in seeds:
        ran.clear()
        latents = torch.randn(1, 80, 16, generator=torch.Generator().manual_seed(seed))
        case(12, latents=latents.chunk(2, 1)[rank])
        counts.append(len(ran))
    return counts


def two_can_share(case, tokens=8):
    """The pipeline, with a number of tokens of text that two ranks can share."""
    for name, value in case.arguments.items():
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == TEXT:
            case.arguments[name] = torch.cat([value, value[:, : tokens - TEXT]], 1)
    return case


def in_parallel(rank, kind):
    """A run under context parallel: how often the model ran, how far the picture is from that of
    one rank, and the picture."""
    from diffusers import ContextParallelConfig

    torch.accelerator.device_count = lambda: 2
    case = two_can_share(case_of(kind))
    tome_nodes.apply_patch(case.pipeline, **BALANCED)
    alone, ran = case(12), []
    for name, network in case.pipeline.components.items():
        if name.startswith("transformer"):
            network.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
            network.register_forward_hook(lambda *_: ran.append(1))
    together = case(12)
    return len(ran), relative_error(together, alone), together.numpy()


def in_tensor_parallel(rank):
    """The same, of a model whose weights are split within layers."""
    from torch.distributed.tensor import parallel

    case = case_of("flux")
    tome_nodes.apply_patch(case.pipeline, **BALANCED)
    alone = case(12)
    mesh = distributed.init_device_mesh("cpu", (2,))
    plan = {"net.0.proj": parallel.ColwiseParallel(), "net.2": parallel.RowwiseParallel()}
    for block in case.network.transformer_blocks:
        parallel.parallelize_module(block.ff, mesh, plan)
    assert list(ranks.ranks_of(case.network)) == [0, 1]
    ran = runs_of(case.network)
    together = case(12)
    return len(ran), relative_error(together, alone), together.numpy()


def trains(rank):
    """How far gradients under DDP are from the mean of what each rank has alone."""
    unet = make_unet()
    tome_nodes.apply_patch(unet)

    def loss(model, seed):
        return model(timestep=torch.tensor(500), **inputs(unet, seed=seed)).sample.square().mean()

    with torch.enable_grad():
        (loss(unet, 0) / 2 + loss(unet, 1) / 2).backward()
        expected = [weight.grad.clone() for weight in unet.parameters()]
        unet.zero_grad()
        replica = torch.nn.parallel.DistributedDataParallel(unet)
        loss(replica, rank).backward()
    found = [weight.grad for weight in unet.parameters()]
    return relative_error(
        *(torch.cat([each.flatten() for each in all]) for all in (found, expected))
    )


def compiles(rank):
    """A run of a sharded model that is compiled: how often it ran, and how far the picture is from
    that of one rank."""
    case = case_of("flux")
    tome_nodes.apply_patch(case.pipeline, **BALANCED)
    alone = case(12)
    shard(case.network)
    ran = runs_of(case.network)
    case.network.compile(backend="eager")
    together = case(12)
    return len(ran), relative_error(together, alone)


def runs_out(rank):
    """Rank 1 runs out of memory in its second call."""
    case = case_of("unet")
    tome_nodes.apply_patch(case.pipeline)
    shard(case.network)
    calls = []

    def fail(*_):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("on purpose")

    case.network.up_blocks[1].register_forward_pre_hook(fail)
    case(6)


def sampled(rank, attach):
    """A picture of a tiny Flux in ComfyUI, to which a pickled function attaches the pack."""
    import comfyui_in_process  # noqa: F401
    from models import comfyui

    tiny = comfyui.TINY["flux"]
    model = pickle.loads(attach)(comfyui.build(tiny))
    return comfyui.sample(model, tiny, steps=12).numpy()
