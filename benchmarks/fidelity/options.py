"""Everything that a user of a transformer could pick to save time, and what each would cost.

The cost of a run is that of its evaluations, over those of the plain run. An evaluation on fewer
tokens costs the share that it has in blocks of Flux's published width at 1024x1024 pixels, so that
a small judge, whose blocks spend their time elsewhere, does not flatter.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from comfy.model_patcher import ModelPatcher
from torch import nn

from benchmarks.fidelity import rivals
from benchmarks.fidelity.merging_methods import ours, preset
from benchmarks.fidelity.rivals import Patch
from benchmarks.speed.methods import ToDoStrategy
from benchmarks.speed.published import MODELS

(FLUX,) = (model for model in MODELS if model.name == "Flux")
TOKENS = 4096
"""Those of a picture of 1024x1024 pixels."""

STEPS, CACHE, FORECAST, SIZE = "fewer steps", "cache", "forecast", "lower resolution"
MERGING, OURS, BOTH = "merging", "ours", "ours and another"
FEWER: dict[int, Sequence[int]] = {
    20: (16, 13, 10, 8, 6),
    12: (10, 9, 8, 7, 6),
    8: (7, 6, 5, 4, 3),
    4: (3, 2),
}
"""To how many steps a run of so many can be cut."""


@dataclass(frozen=True)
class Option:
    """Something to pick.

    Attributes:
        name: its name in tables.
        kind: one of the constants above.
        patch: makes the patched clone of a model.
        steps: of the run; None for those of the plain one.
        shrunk: by how much the sides of the picture are divided, before it is scaled up.
        queries: the share of queries that attention is left with.
        keys: the same of keys and values.
    """

    name: str
    kind: str
    patch: Patch = field(default=lambda model: model)
    steps: int | None = None
    shrunk: int = 1
    queries: float = 1.0
    keys: float = 1.0


def without_merging(steps: int) -> list[Option]:
    """What to pick on any model in place of a run of so many steps, without merging."""
    found = [Option(f"{fewer} steps", STEPS, steps=fewer) for fewer in FEWER[steps]]
    caches = {"EasyCache": rivals.easy_cache, "LazyCache": rivals.lazy_cache}
    for name, cache in caches.items():
        for threshold in (0.1, 0.2, 0.4):
            found.append(Option(f"{name} {threshold:g}", CACHE, cache(threshold)))
    found.append(Option("forecast", FORECAST, rivals.forecast()))
    if steps >= 8:
        found.append(Option("forecast, more skipped", FORECAST, rivals.forecast(4)))
    return found


def options(steps: int) -> list[Option]:
    """Everything to pick on a transformer in place of a run of so many steps."""
    found = without_merging(steps)
    found += [
        Option("half the size", SIZE, shrunk=2),
        Option("ToDo k,v 0.75", MERGING, _todo(), keys=0.25),
        Option("pooled k,v 0.75", MERGING, _pooled(), keys=0.25),
        Option("q,k,v 0.5, as the paper", MERGING, _paper(), queries=0.5, keys=0.5),
        Option("k,v 0.5, unweighted", MERGING, _paper(attn_tokens="k,v"), keys=0.5),
        Option("blocks 0.5, as ToMA", MERGING, _toma(0.5)),
    ]
    for ratio in (0.5, 0.75):
        found.append(Option(f"quality {ratio:g}", OURS, preset("quality", ratio), keys=1 - ratio))
    for ratio in (0.6, 0.75, 0.85):
        found.append(Option(f"balanced {ratio:g}", OURS, preset("balanced", ratio), keys=1 - ratio))
    for ratio in (0.3, 0.5, 0.6, 0.75):
        found.append(Option(f"fast {ratio:g}", OURS, preset("fast", ratio)))
    both = {"EasyCache 0.2": rivals.easy_cache(), "forecast": rivals.forecast()}
    for name, other in both.items():
        balanced = _then(preset("balanced", 0.6), other)
        found += [
            Option(f"balanced 0.6, {name}", BOTH, balanced, keys=0.4),
            Option(f"fast 0.5, {name}", BOTH, _then(preset("fast", 0.5), other)),
        ]
    return found


def _todo() -> Patch:
    return ours(ToDoStrategy, ratio=0.75, attn_tokens="k,v", proportional_attn=False)


def _pooled() -> Patch:
    return ours(ratio=0.75, strategy="pool", attn_tokens="k,v")


def _paper(**settings: Any) -> Patch:
    """Merged keys count once, as in the paper."""
    return ours(proportional_attn=False, **settings)


def _toma(ratio: float) -> Patch:
    """Each block on tokens merged within windows, in each step, merged keys counted once."""
    return ours(ratio=ratio, strategy="window", scope="block", proportional_attn=False)


def _then(first: Patch, second: Patch) -> Patch:
    return lambda model: second(first(model))


class Meter:
    """Adds up what the evaluations of a model cost, by the tokens that reach one of its blocks.

    Args:
        tokens: those of a picture and its prompt; None for a UNet, whose evaluations cost the same.

    Attributes:
        cost: so far, 1 for each sample evaluated on all tokens.
        evaluations: how many there were, those of several samples at once counting as one.
    """

    def __init__(self, tokens: int | None):
        self.cost, self.evaluations = 0.0, 0
        self._tokens = tokens

    @contextmanager
    def watching(self, model: ModelPatcher, option: Option) -> Iterator[None]:
        """Count what the model does meanwhile."""
        network: Any = model.model.diffusion_model
        layer: nn.Module = network.out if self._tokens is None else _middle(network)

        def count(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            samples, tokens = arguments[0].shape[:2]
            share = 1.0
            if self._tokens is not None:
                share = cost_of_block(tokens / self._tokens, option.queries, option.keys)
            self.cost += samples * share
            self.evaluations += 1

        handle = layer.register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()


def _middle(network: Any) -> nn.Module:
    """The first layer of a block in the middle."""
    blocks = network.single_blocks
    layer: nn.Module = blocks[len(blocks) // 2].linear1
    return layer


def cost_of_block(tokens: float, queries: float = 1.0, keys: float = 1.0) -> float:
    """The multiplications of a block of Flux, over those on all tokens.

    Args:
        tokens: the share of tokens that it runs on.
        queries: the share of those that are queries.
        keys: the share of those that are keys.
    """
    attention = FLUX.attention_share(TOKENS)
    return tokens * (1 - attention) + tokens**2 * queries * keys * attention
