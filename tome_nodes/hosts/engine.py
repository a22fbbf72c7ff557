"""What merging runs on where the model is: the strategy, on a backend that works there."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from ..config import ToMeConfig
from ..grid import Grid
from ..ops import operations, resolve
from ..schedule import least_tokens
from ..strategies import Strategy


@dataclass(frozen=True)
class Engine:
    """A strategy that was tried on a device.

    Attributes:
        strategy: makes the plans.
        least_tokens: what a feature map must have to be merged.
        pays_from: what it must have for merging to pay, whatever the settings ask for.
        backend: ``torch`` or ``triton``.
        ops: the operations of the backend.
        no_triton: why it is not Triton, where that could be expected.
        lacks: what the device answers since it cannot merge at all, None where it can.
    """

    strategy: Strategy
    least_tokens: int
    pays_from: int
    backend: str
    ops: ModuleType
    no_triton: str | None
    lacks: str | None

    def in_words(self) -> list[str]:
        """What a report tells of it: nothing where it is as everybody expects."""
        if self.backend == "triton":
            return ["triton"]
        if self.no_triton is not None:
            return [f"torch as Triton cannot be used ({self.no_triton})"]
        return []


def make_engine(
    config: ToMeConfig,
    make_strategy: Callable[[ToMeConfig], Strategy],
    device: torch.device,
    dtype: torch.dtype,
) -> Engine:
    """The engine of a config for tokens of one device and dtype.

    Raises:
        torch.OutOfMemoryError: the device has no room for a small plan.
    """
    backend, no_triton = resolve(config.backend, device, dtype)
    strategy = make_strategy(replace(config, backend=backend))
    lacks = missing_operation(strategy, operations(backend), device, dtype)
    if lacks is not None and backend == "triton":
        backend, no_triton = "torch", lacks
        strategy = make_strategy(replace(config, backend=backend))
        lacks = missing_operation(strategy, operations(backend), device, dtype)
    least = least_tokens(config, device.type, backend)
    pays_from = least_tokens(replace(config, min_tokens=0), device.type, backend)
    return Engine(strategy, least, pays_from, backend, operations(backend), no_triton, lacks)


def missing_operation(
    strategy: Strategy, ops: ModuleType, device: torch.device, dtype: torch.dtype
) -> str | None:
    """What the device answers when it cannot run an operation of merging, None when it can."""
    # The largest cells are 8 tokens high and wide.
    grid = Grid(16, 16)
    try:
        strategy.start_step(torch.zeros((), dtype=torch.int64, device=device), 0.5)
        features = torch.ones(1, grid.tokens, 8, dtype=dtype, device=device)
        plan = strategy.plan(features, grid)
        merged, *_ = plan.merge_qkv(features)
        plan.merge(features)
        plan.unmerge(merged)
        plan.add_change(features, merged, merged)
        ops.widen(features, merged, merged, merged[:, :, 0], 1, 1.0, 1.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # The compilers of kernels fail in ways of their own.
        first_line = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"
    return None
