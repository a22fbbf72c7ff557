"""Shallow steps of a UNet: a trial, which is not part of the pack (see benchmarks/FIDELITY.md).

On a shallow evaluation, only the outer blocks run, on the true noisy latent, and what comes up from
the deep ones is kept from the last whole evaluations (DeepCache, arXiv 2312.00858). The deep layers
get stand-ins for the length of an evaluation, which hand on feature maps of no channels, and what
is kept comes in by a patch of the output blocks. So nothing of the host's forward is copied, and
patches of other nodes and ControlNets work as they do on a whole evaluation.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor, nn

from tome_nodes.forecasting.steps import log_snr

_SHALLOW = 0.75
"""The share of the evaluations after the fourth that is shallow."""

_KEY = "shallow steps"
_PATCHES = (
    "input_block_patch",
    "input_block_patch_after_skip",
    "middle_block_after_patch",
    "output_block_patch",
)
"""The patches that see feature maps between the blocks of a UNet."""


def whole_evaluations(count: int) -> Collection[int]:
    """The whole ones of ``count`` evaluations, from 0.

    The first quarter is whole, at least three evaluations. From there on, each gap is longer than
    the one before by the same amount.
    """
    shallow = round(_SHALLOW * max(0, count - 4))
    first = min(count, max(3, round(count / 4)))
    later = count - shallow - first
    gaps = later + 1
    growth = shallow / (gaps * (gaps + 1) / 2)
    places = (index + growth * index * (index + 1) / 2 for index in range(1, gaps))
    return {*range(first), *(round(first - 1 + place) for place in places)}


class Shallow:
    """Makes some evaluations of a model's runs shallow, under samplers that evaluate a step once.

    Args:
        cut: how many input blocks after the first, and output blocks before the last, are outside.
        damping: the share of the line through the last two features, over the logarithm of signal
            to noise, along which the next ones go on; 0 copies the last.
        plan: gives the whole evaluations of a run, from 0, for how many there are.

    Attributes:
        whole, shallow: how many evaluations of a condition there were of each kind.
    """

    def __init__(
        self,
        cut: int = 0,
        damping: float = 0.5,
        plan: Callable[[int], Collection[int]] = whole_evaluations,
    ):
        self.whole = self.shallow = 0
        self._plan, self._cut, self._damping = plan, cut, damping
        self._known: dict[Hashable, list[tuple[float, Tensor]]] = {}
        self._answers, self._is_shallow, self._place = 0, False, 0.0
        self._calls: Counter[Hashable] = Counter()

    def patch(self, model: ModelPatcher) -> ModelPatcher:
        """The patched clone of a model."""
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, _KEY, self._sample)
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, _KEY, self._answer)
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, _KEY, self._evaluate)
        return clone

    def _sample(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        self._answers = self.whole = self.shallow = 0
        try:
            return executor(*args, **kwargs)
        finally:
            self._known.clear()

    def _answer(self, executor: WrapperExecutor, x: Any, sigma: Tensor, *args: Any) -> Any:
        levels = args[0]["transformer_options"]["sample_sigmas"]
        self._is_shallow = self._answers not in self._plan(len(levels) - 1)
        self._place = log_snr(float(sigma.max()), is_flow=False)
        self._answers += 1
        self._calls.clear()
        return executor(x, sigma, *args)

    def _evaluate(
        self,
        executor: WrapperExecutor,
        x: Tensor,
        timesteps: Any,
        context: Any,
        y: Any,
        control: Any,
        options: dict[str, Any],
        **others: Any,
    ) -> Tensor:
        keys = self._keys_of(options, x)
        given = self._given(keys) if self._is_shallow else None
        call = Call(executor.class_obj, self._cut, options, given)
        with call.installed():
            own = call.control(control)
            answer: Tensor = executor(x, timesteps, context, y, own, call.options, **others)
        if call.came is None:
            self.shallow += len(keys)
            return answer
        self.whole += len(keys)
        for key, features in zip(keys, call.came.chunk(len(keys)), strict=True):
            self._known[key] = [*self._known.get(key, ())[-1:], (self._place, features)]
        return answer

    def _keys_of(self, options: Mapping[str, Any], x: Tensor) -> list[Hashable]:
        """What tells each condition of a call from the others of its step, in their order.

        Other nodes evaluate a condition several times in a step, in areas or without a part.
        """
        keys: list[Hashable] = []
        for name in options.get("uuids") or options["cond_or_uncond"]:
            key = (name, *x.shape[1:])
            keys.append((*key, self._calls[key]))
            self._calls[key] += 1
        return keys

    def _given(self, keys: Sequence[Hashable]) -> Tensor | None:
        """The features for the conditions of a call; None if any has none."""
        known = [self._known.get(key) for key in keys]
        return torch.cat([self._at(each) for each in known if each]) if all(known) else None

    def _at(self, known: Sequence[tuple[float, Tensor]]) -> Tensor:
        (first, before), (last, features) = known[0], known[-1]
        if len(known) < 2 or not self._damping:
            return features
        share = self._damping * (self._place - last) / (last - first)
        return torch.lerp(before, features, 1 + share)


class Call:
    """One call of a UNet, whole or shallow.

    Args:
        unet: the host's.
        cut: see :class:`Shallow`.
        options: the transformer options of the call.
        given: what the deep blocks would give; None if the call is whole.

    Attributes:
        options: the same, with our patch among those of other nodes.
        came: what came up from the deep blocks of a whole call.
    """

    def __init__(self, unet: Any, cut: int, options: Mapping[str, Any], given: Tensor | None):
        self.came: Tensor | None = None
        self._given = given
        inputs, outputs = len(unet.input_blocks), len(unet.output_blocks)
        self._outer = cut + 1
        self._first = outputs - self._outer
        self._deep = {
            **{("input", index): unet.input_blocks[index] for index in range(self._outer, inputs)},
            ("middle", 0): unet.middle_block,
            **{("output", index): unet.output_blocks[index] for index in range(self._first)},
        }
        patches = {name: [*of_name] for name, of_name in (options.get("patches") or {}).items()}
        if given is not None:
            for name in _PATCHES:
                patches[name] = [self._outside(patch) for patch in patches.get(name, ())]
        # Ours is first: what others change is not kept, and they see what ours gives.
        patches["output_block_patch"] = [self._patch, *patches.get("output_block_patch", ())]
        self.options = {**options, "patches": patches}

    def control(self, control: Any) -> Any:
        """What a ControlNet adds to the blocks: nothing to those that do not run."""
        if self._given is None or not control:
            return control
        kept = {name: [*added] for name, added in control.items()}
        # The host takes what it adds from the end of each list.
        left_out = {"input": slice(0, -self._outer), "middle": slice(None)}
        left_out["output"] = slice(max(0, len(kept.get("output", ())) - self._first), None)
        for name, deep in left_out.items():
            if name in kept:
                kept[name][deep] = [None] * len(kept[name][deep])
        return kept

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put stand-ins on the layers of deep blocks, if the call is shallow."""
        layers: list[nn.Module] = []
        if self._given is not None:
            layers = [layer for block in self._deep.values() for layer in block or ()]
        before = [vars(layer).get("forward") for layer in layers]
        try:
            for layer in layers:
                vars(layer)["forward"] = _nothing
            yield
        finally:
            for layer, forward in zip(layers, before, strict=True):
                vars(layer).pop("forward", None)
                if forward is not None:
                    vars(layer)["forward"] = forward

    def _patch(self, h: Tensor, skip: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if options["block"] != ("output", self._first):
            return h, skip
        # Others may change it in place.
        if self._given is not None:
            return self._given.clone(), skip
        self.came = h.clone()
        return h, skip

    def _outside(self, patch: Callable[..., Any]) -> Callable[..., Any]:
        """The patch of another node, for the blocks that run."""

        def patched(h: Any, *others: Any) -> Any:
            options = h["transformer_options"] if isinstance(h, dict) else others[-1]
            if options["block"] not in self._deep:
                return patch(h, *others)
            return (h, others[0]) if len(others) == 2 else h

        return patched


def _nothing(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What a deep layer gives in a shallow call: a feature map of no channels."""
    return x[:, :0]
