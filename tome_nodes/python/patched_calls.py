"""The calls of a patched model in one thread."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.decorators import skip


class PatchedCalls:
    """The calls of a model in one thread.

    Attributes:
        network: the model that is called.
        is_running: whether a call is going on. PyTorch's own code may call the model once more
            within it, which is part of the same call.
    """

    def __init__(self, network: nn.Module):
        self.network = network
        self.is_running = False

    @skip
    def call(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of the model returns; ``forward`` calls the model itself."""
        # Of torch.compile, nothing is traced here.
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if is_traced or torch.compiler.is_compiling():
            self.warn_of_tracing()
            return forward(*args, **kwargs)
        return self.answer(forward, args, kwargs)

    def answer(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The same of a call that is not traced."""
        raise NotImplementedError

    def end_run(self) -> None:
        """End a sampling run that may still be going on: its pipeline has stopped or returned."""

    def warn_of_tracing(self) -> None:
        """Say once that nothing is done in calls that are traced or exported, if that is so."""
