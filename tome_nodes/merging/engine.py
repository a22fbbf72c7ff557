"""What merging runs on: a strategy with a backend that works on the model's device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..ops import Operations, operations, resolve
from ..settings.config import ToMeConfig
from ..strategies.plan import Grid
from ..strategies.strategy import Strategy
from .key_weights import Ways, capabilities

MakeStrategy = Callable[[ToMeConfig, Operations], Strategy]
"""Makes the strategy for given settings and operations."""


@dataclass(frozen=True)
class Engine:
    """A strategy that was tried on a device.

    Attributes:
        strategy: groups the tokens.
        why_torch: why the backend is torch where Triton could be expected; else None.
        error: the error of the device if it cannot merge at all; else None.
        ways: how attention functions weigh keys on the device. Blocks read it here, since asking
            the device would break the graph of a compiled model.
    """

    strategy: Strategy
    why_torch: str | None
    error: str | None
    ways: Ways

    def backend(self) -> str:
        """What a report says about the backend; ``torch`` or ``triton`` if it is as expected."""
        if self.why_torch is not None:
            return f"torch as Triton cannot be used ({self.why_torch})"
        return self.strategy.ops.name


def make_engine(
    config: ToMeConfig,
    make_strategy: MakeStrategy,
    device: torch.device,
    dtype: torch.dtype,
) -> Engine:
    """The engine for some settings, and for tokens of one device and dtype.

    Raises:
        torch.OutOfMemoryError: the device has no room for a small plan.
    """
    backend, why_torch = resolve(config.backend, device, dtype)
    # Only the settings that grouping depends on, so that a new seed or ratio needs no new trial.
    grouping = ToMeConfig(
        strategy=config.strategy,
        sx=config.sx,
        sy=config.sy,
        use_rand=config.use_rand,
    )
    error = missing_operation(grouping, make_strategy, backend, device, dtype)
    if error is not None and backend == "triton":
        backend, why_torch = "torch", error
        error = missing_operation(grouping, make_strategy, backend, device, dtype)
    strategy = make_strategy(config, operations(backend))
    ways = Ways(device, dtype, capabilities(device, dtype))
    return Engine(strategy, why_torch, error, ways)


@lru_cache(maxsize=64)
def missing_operation(
    config: ToMeConfig,
    make_strategy: MakeStrategy,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """The error of a device that cannot run an operation of merging; None if it can run all.

    The answer is cached, since Triton has to compile its kernels to find out.
    """
    strategy = make_strategy(config, operations(backend).without_fallback())
    # The largest cells are 8 tokens high and wide.
    grid = Grid(16, 16)
    try:
        strategy.begin(torch.zeros((), dtype=torch.int64, device=device))
        features = torch.ones(1, grid.tokens, 8, dtype=dtype, device=device)
        plan = strategy.plan(features, grid, 0.5)
        if plan is None:
            return None
        merged = plan.merge(features)
        plan.merge_keys(features)
        plan.unmerge(merged)
        plan.add_change(features, merged, merged)
        strategy.ops.widen(features, merged, merged, merged[:, :, 0], 1, 1.0, 1.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Kernel compilers raise exceptions of their own.
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0]
