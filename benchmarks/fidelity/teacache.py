"""TeaCache (arXiv 2411.19108) for ComfyUI's Flux.

How much what the blocks of a step return will differ from the step before is estimated from how
much their modulated input does, by a polynomial. While the sum of these estimates is below a
threshold, the blocks do not run, and what they changed last is added again.

    .venv/bin/python -m benchmarks.fidelity.teacache    fit the polynomials
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.host import use_cpu

if __name__ == "__main__":
    use_cpu()

import numpy as np
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor

from benchmarks.fidelity.rivals import Patch, step_at

OF_IMAGE: Sequence[float] = (346.2, -208.7, 37.93, -1.714, 0.06602)
"""The polynomial of the judge *image*, highest power first."""

OF_FEW: Sequence[float] = (367.5, -307.1, 83.06, -7.669, 0.2998)
"""The same of the judge *few*."""

_DEGREE = 4


class TeaCache:
    """The blocks of one model in a run.

    Attributes:
        changes: of each step after the first, how much the modulated input of the blocks changed,
            as a share of the step before, and how much what they returned did.
    """

    def __init__(self, estimate: Callable[[float], float], threshold: float):
        """Prepare a run.

        Args:
            estimate: the change of what the blocks return from that of their modulated input.
            threshold: up to which sum of estimates no block runs; 0 runs them in each step.
        """
        self.changes: list[tuple[float, float]] = []
        self._estimate, self._threshold = estimate, threshold
        self._at_the_ends = True
        self._skips = False
        self._sum = self._input_change = 0.0
        self._modulated: Tensor | None = None
        self._entered: Tensor | None = None
        self._returned: Tensor | None = None
        self._changed: Tensor | None = None

    def attached_to(self, model: ModelPatcher) -> ModelPatcher:
        """A clone of a Flux whose blocks run as TeaCache says."""
        clone, network = model.clone(), model.model.diffusion_model
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "teacache", self._begin)
        for index, block in enumerate(network.double_blocks):
            first = block if index == 0 else None
            clone.set_model_patch_replace(self._run(first), "dit", "double_block", index)
        for index in range(len(network.single_blocks)):
            is_last = index == len(network.single_blocks) - 1
            clone.set_model_patch_replace(self._run(None, is_last), "dit", "single_block", index)
        return clone

    def _begin(self, executor: WrapperExecutor, x: Tensor, times: Tensor, *others: Any) -> Any:
        # As published, the first and the last step always run.
        given = (each for each in others if isinstance(each, dict))
        options = next(each for each in given if "sample_sigmas" in each)
        levels = options["sample_sigmas"]
        step = step_at(options["sigmas"], levels)
        self._at_the_ends = step in (0, len(levels) - 2)
        if step == 0:
            self._modulated = self._returned = self._changed = None
        return executor(x, times, *others)

    def _run(self, first: Any = None, is_last: bool = False) -> Callable[..., dict[str, Any]]:
        def run(arguments: dict[str, Any], original: dict[str, Any]) -> dict[str, Any]:
            picture = arguments["img"]
            if first is not None:
                self._decide(first, picture, arguments["vec"])
            if self._skips:
                return arguments | ({"img": picture + self._changed} if first is not None else {})
            result: dict[str, Any] = original["original_block"](arguments)
            if is_last:
                self._keep(result["img"])
            return result

        return run

    def _decide(self, block: Any, picture: Tensor, vector: Tensor) -> None:
        modulation, _ = block.img_mod(vector)
        modulated = (1 + modulation.scale) * block.img_norm1(picture) + modulation.shift
        before, self._modulated = self._modulated, modulated
        self._entered = picture
        change = 1.0 if before is None else _change(before, modulated)
        self._sum += self._estimate(change)
        self._skips = not self._at_the_ends and self._sum < self._threshold
        if not self._skips:
            self._sum = 0.0
            self._input_change = change

    def _keep(self, sequence: Tensor) -> None:
        assert self._entered is not None
        picture = sequence[:, -self._entered.shape[1] :]
        if self._returned is not None:
            self.changes.append((self._input_change, _change(self._returned, picture)))
        self._returned, self._changed = picture, picture - self._entered


def _change(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().mean() / before.abs().mean())


def teacache(threshold: float, polynomial: Sequence[float]) -> Patch:
    """The patch that makes a clone with TeaCache."""

    def estimate(change: float) -> float:
        return float(np.polyval(polynomial, change))

    return lambda model: TeaCache(estimate, threshold).attached_to(model)


def main() -> None:
    """Fit the polynomial of each judge to plain runs of its numbers of steps."""
    from benchmarks.fidelity.judges import BENCHES

    for name, all_steps in (("image", (8, 20, 40)), ("few", (4, 8, 20))):
        changes: list[tuple[float, float]] = []
        for steps in all_steps:
            cache = TeaCache(lambda change: change, 0.0)
            judge = BENCHES[name].make(steps, 1)
            judge.pictures(cache.attached_to(judge.model))
            changes += cache.changes
        into, out = zip(*changes, strict=True)
        print(name, ", ".join(f"{each:.4g}" for each in np.polyfit(into, out, _DEGREE)))
        print(*(f"{one:.3f} {other:.3f}" for one, other in sorted(changes)), sep="\n")


if __name__ == "__main__":
    main()
