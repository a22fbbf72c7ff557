"""The checks that a method must pass before it is timed."""

from contextlib import nullcontext

import torch
from torch import Tensor

from benchmarks.speed.measure import Subject, merged_blocks
from benchmarks.speed.methods import KeepingStrategy, Method
from tome_nodes.patching.engine import make_engine
from tome_nodes.strategies.plan import Grid

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The relative error that the order of sums may cause in a whole model, by precision."""

PLAN_GRID = Grid(32, 48)


class WrongOutput(ValueError):
    """A method computes something wrong."""


def difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; raises if it is not finite."""
    if actual.shape != expected.shape:
        raise WrongOutput(f"its output is {tuple(actual.shape)}, not {tuple(expected.shape)}")
    if not actual.isfinite().all():
        raise WrongOutput("its output is not finite")
    expected = expected.float()
    return ((actual.float() - expected).norm() / expected.norm()).item()


def check_wiring(method: Method, subject: Subject, expected: Tensor) -> None:
    """Check that a method with lossless plans computes what the unpatched model computes.

    On our host, lossless plans shuffle the tokens. ComfyUI's nodes get settings that change
    nothing.
    """
    patched = method.lossless(subject.model)
    (actual,) = subject.run(patched, nullcontext())
    if method.plans is not None and not merged_blocks(patched)[0]:
        raise WrongOutput("it merged no block")
    error = difference(actual, expected)
    allowed = TOLERANCES[subject.model.model.get_dtype_inference()]
    if error > allowed:
        raise WrongOutput(
            f"with lossless plans it differs from the unpatched model by {error:.2g}; "
            f"allowed: {allowed:.2g}"
        )


@torch.no_grad()
def check_plan(method: Method, device: torch.device, dtype: torch.dtype) -> None:
    """Check that a plan divides the tokens, merges them to means and copies these back."""
    if method.plans is None:
        return
    (config, make_strategy), grid = method.plans, PLAN_GRID
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, grid.tokens, 64, generator=generator).to(device, dtype)
    engine = make_engine(config, make_strategy, device, dtype)
    if engine.error is not None:
        raise WrongOutput(f"the device cannot run it: {engine.error}")
    if config.backend not in ("auto", engine.backend):
        raise WrongOutput(f"it cannot run on {config.backend}: {engine.why_torch}")
    strategy = engine.strategy
    strategy.begin(torch.zeros((), dtype=torch.int64, device=device))
    plan = strategy.plan(features, grid, config.ratio)
    if plan is None:
        raise WrongOutput(f"it makes no plan for {grid.height}x{grid.width} tokens")
    numbers = torch.arange(plan.slot_count, device=device).float()
    slots = plan.unmerge(numbers.expand(2, -1)[..., None].contiguous())[..., 0].round().long()
    counts = torch.stack([torch.bincount(row, minlength=plan.slot_count) for row in slots])
    if counts.shape != (2, plan.slot_count) or (counts == 0).any():
        raise WrongOutput(f"its plan has {plan.slot_count} slots, and not all of them hold a token")
    most = grid.tokens - int(grid.tokens * config.ratio)
    if abs(plan.slot_count - most) > 0.02 * grid.tokens:
        raise WrongOutput(f"its plan has {plan.slot_count} slots, where {most} are asked for")
    if isinstance(strategy, KeepingStrategy):
        return
    sums = torch.zeros(2, plan.slot_count, 64, dtype=torch.float64, device=device)
    sums.scatter_add_(1, slots[..., None].expand(-1, -1, 64), features.double())
    error = difference(plan.merge(features).double(), sums / counts[..., None])
    if error > TOLERANCES[dtype]:
        raise WrongOutput(f"its plan merges to values that differ from the means by {error:.2g}")
