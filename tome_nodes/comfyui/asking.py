"""Ask a transformer that has no record where its picture is.

It is evaluated twice, the second time on a changed latent. Meanwhile its attention only hands on
values, its linear layers only copy channels, and of blocks that are alike only the first runs. So
no token sees another, and the keys that differ are those of the picture
(:mod:`tome_nodes.merging.picture_search`). This takes about a hundredth of an evaluation, once for
each form of the inputs, and reads next to no weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..merging.layout import Layout, Picture, Span
from ..merging.picture_search import Sides, changed, changes, fingerprints, most_changed, span_of
from ..patching.blocks import Layouts, uncompiled
from ..patching.evaluation import lock_of
from ..patching.overrides import Forward, Override, Overrides
from .attention import OVERRIDE
from .key_weights import flat
from .models.base import Inputs
from .models.unknown import blocks_of

Evaluate = Callable[[Tensor, Mapping[str, Any], dict[str, Any]], Any]
"""Evaluates the host's model on a latent, under conditions and transformer options."""

_OTHERS = ("wrappers", "callbacks", "patches", "patches_replace", OVERRIDE)
"""Transformer options of other nodes, which have nothing to do with what is asked."""

_PLAIN = (bool, int, float, str, Tensor, list, tuple)
"""Types of transformer options that cannot be a memory of the model."""

_NUMBERING = ("idx", "index", "layer", "block")
"""Parts of the names of attributes that tell which of several equal blocks one is."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of all modules."""

_MOST_KEPT = 64

_answers: WeakKeyDictionary[nn.Module, dict[Any, "Answer"]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Answer:
    """Where the pictures are in the sequences of a model, for inputs of one form.

    Attributes:
        layouts: by the name of each block that attends to a picture, and by the number of queries
            and keys of an attention; None where there is no picture.
        stacks: the names of the lists that hold these blocks.
        passes_options: whether the model hands the transformer options to them.
        obstacle: why nothing can merge, None if something can.
    """

    layouts: Layouts = field(default_factory=dict)
    stacks: tuple[str, ...] = ()
    passes_options: bool = True
    obstacle: str | None = None

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """All pictures, once for each attention that they are in."""
        return tuple(
            Picture(span.grid)
            for layouts in self.layouts.values()
            for layout in layouts.values()
            if layout is not None
            for span in layout.spans
        )


def ask(
    model: Any,
    latent: Tensor,
    inputs: Inputs,
    options: Mapping[str, Any],
    evaluate: Evaluate,
) -> Answer:
    """Where the pictures of a model are; an earlier answer, if there is one for such inputs.

    Args:
        model: a BaseModel of the host.
        latent: as the host's model gets it; with sound, both are packed into one.
        inputs: the shape of the latent, and the conditions.
        options: the transformer options.
        evaluate: evaluates the host's model, without the wrappers of other nodes.
    """
    network = uncompiled(model.diffusion_model)
    with lock_of(network):
        kept = _answers.setdefault(network, {})
        form = _form((inputs.shape, inputs.conditions))
        if form not in kept:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[form] = _asked(model, network, latent, inputs, options, evaluate)
        return kept[form]


def _asked(
    model: nn.Module,
    network: nn.Module,
    latent: Tensor,
    inputs: Inputs,
    options: Mapping[str, Any],
    evaluate: Evaluate,
) -> Answer:
    name = type(network).__name__
    if len(inputs.shape) not in (4, 5):
        return Answer(obstacle=f"a {name} makes no picture")
    own = {
        key: value
        for key, value in options.items()
        if key not in _OTHERS and isinstance(value, _PLAIN)
    }
    references = _references(inputs)

    def watched(latent: Tensor, others: Mapping[str, Any]) -> _Watch:
        watch = _Watch(model, network)
        with watch.installed():
            evaluate(latent, {**inputs.conditions, **others}, own | {OVERRIDE: watch.attention})
        return watch

    try:
        with torch.no_grad(), _undisturbed(network, latent.device):
            before = watched(latent, {})
            after = watched(_changed_latent(latent, inputs.shape), {})
            with_references = watched(latent, _changed_all(references)) if references else None
        answer = _answer(name, before, after, with_references, inputs, references, len(latent))
    except Exception as error:
        # It may fail where the model itself does not, and then only merging is lost.
        why = f"{type(error).__name__}: {error}"
        answer = Answer(obstacle=f"where the picture of a {name} is could not be asked ({why})")
    return answer


def _answer(
    name: str,
    before: "_Watch",
    after: "_Watch",
    with_references: "_Watch | None",
    inputs: Inputs,
    references: Mapping[str, Any],
    batch: int,
) -> Answer:
    """What was found by comparing evaluations."""
    if any(each.has_kept for each in (before, after, with_references) if each is not None):
        return Answer(obstacle=f"a {name} keeps something from one evaluation to the next")
    if not before.blocks:
        why = "does not hand the transformer options to its attention"
        return Answer(obstacle=f"a {name} {why}, or attends outside of its blocks")
    sides = _sides(inputs.shape)
    sizes = [_sides(each.shape) for value in references.values() for each in _tensors(value)]
    found: dict[str, dict[tuple[int, int], Layout | None]] = {}
    reasons: list[str] = []
    for block in before.order:
        if block in before.left_out:
            representative, _ = before.left_out[block]
            if not _same_places(before, after, block, found[representative], sides):
                # What stood for it did not do to its tokens what follows reckons with.
                reasons.append("its tokens change places between blocks")
                break
            found[block] = found[representative]
            continue
        again = after.blocks.get(block)
        other = None if with_references is None else with_references.blocks.get(block)
        layouts = found[block] = {}
        for index, call in enumerate(before.blocks[block].calls):
            later = again.calls[index] if again and index < len(again.calls) else None
            referring = other.calls[index] if other and index < len(other.calls) else None
            layout, reason = _layout(call, later, referring, batch, sides, sizes)
            place = call.queries, call.keys
            if layouts.setdefault(place, layout) != layout:
                layouts[place], reason = None, "several attentions of a block differ"
            if reason is not None:
                reasons.append(reason)
    merging = _without_refiners(
        {block: layouts for block, layouts in found.items() if any(layouts.values())}
    )
    if not merging:
        why = reasons[0] if reasons else "its attention has no keys that depend on the picture"
        return Answer(obstacle=f"the picture of a {name} was not found by asking: {why}")
    stacks = dict.fromkeys(block.rpartition(".")[0] for block in merging)
    passes_options = all(
        before.blocks[block].passes_options for block in merging if block in before.blocks
    )
    return Answer(merging, tuple(stacks), passes_options)


def _without_refiners(found: Layouts) -> Layouts:
    """The layouts of the lists with the longest sequence.

    Others hold few blocks: some prepare the picture before the text joins it.
    """
    longest: dict[str, int] = {}
    for block, layouts in found.items():
        stack = block.rpartition(".")[0]
        length = max(layout.length for layout in layouts.values() if layout is not None)
        longest[stack] = max(length, longest.get(stack, 0))
    most = max(longest.values(), default=0)
    return {
        block: layouts
        for block, layouts in found.items()
        if longest[block.rpartition(".")[0]] == most
    }


def _layout(
    call: "_Call",
    later: "_Call | None",
    referring: "_Call | None",
    batch: int,
    sides: Sides,
    references: Sequence[Sides],
) -> tuple[Layout | None, str | None]:
    """Where the pictures are in one attention, or why it has none that can merge."""
    if later is None or later.prints.shape != call.prints.shape:
        return None, "its attention depends on the values of the latent"
    change = changes(call.prints, later.prints)
    if not change.any():
        return None, None
    if len(change) != batch:
        return None, "its attention runs in windows or frames of its own"
    if call.queries != call.keys:
        return None, "only a part of its tokens attend, or the keys are pooled or kept"
    if call.is_masked:
        return None, "its attention has a mask that differs from query to query"
    span = span_of(change, sides)
    if span is None:
        return None, "the tokens of its picture do not stand row by row"
    spans = [span]
    if referring is not None and referring.prints.shape == call.prints.shape:
        spans += _reference_spans(changes(call.prints, referring.prints), span, references)
    return Layout(call.keys, tuple(sorted(spans, key=lambda span: span.start))), None


def _reference_spans(change: Tensor, latent: Span, references: Sequence[Sides]) -> Iterator[Span]:
    """The spans of references, one after another, as long as they stand row by row."""
    change[:, latent.start : latent.stop] = 0
    for sides in references:
        span = span_of(change, sides)
        if span is None:
            return
        change[:, : span.stop] = 0
        yield span


@dataclass(frozen=True, eq=False)
class _Call:
    """What one attention got.

    Attributes:
        queries: their number.
        keys: their number.
        is_masked: whether its mask differs from query to query.
        prints: the fingerprints of the keys, ``[batch, keys, features]``.
    """

    queries: int
    keys: int
    is_masked: bool
    prints: Tensor


@dataclass(eq=False)
class _Seen:
    """What one block did: its calls of attention, and the fingerprints of what entered it."""

    passes_options: bool
    entered: list[Tensor]
    calls: list[_Call] = field(default_factory=list)


class _Watch:
    """Follows one evaluation in which no token sees another.

    Attributes:
        blocks: what each block did that ran and attends, by name.
        left_out: which block stood for each block that was left out, and what entered it.
        order: the names of all blocks that the model called, in the order of their first calls.
        has_kept: whether the model has kept something of its blocks for later evaluations.
    """

    def __init__(self, model: nn.Module, network: nn.Module):
        self.blocks: dict[str, _Seen] = {}
        self.left_out: dict[str, tuple[str, list[Tensor]]] = {}
        self.order: dict[str, None] = {}
        self.has_kept = False
        self._memory: _Memory | None = None
        self._model, self._network = model, network
        self._running: str | None = None
        self._results: dict[Any, tuple[str, Any]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the blocks of the model within this block."""
        overrides = Overrides(self._overrides)
        before = _Memory(self._model)
        try:
            with overrides.installed():
                yield
        finally:
            self.has_kept = self._memory is not None and self._memory.restore()
            if self.has_kept:
                before.restore()

    def _overrides(self) -> Iterator[Override]:
        for name, block in blocks_of(self._network):
            yield block, "forward", self._watched(name, block, block.forward)
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    yield module, "forward", _cheap(module.out_features)

    def _watched(self, name: str, block: nn.Module, forward: Forward) -> Forward:
        kind = _kind(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._memory is None:
                # What is kept before has nothing to do with attention, such as places.
                self._memory = _Memory(self._model)
            self.order.setdefault(name)
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            entered = [fingerprints(each) for each in given if _has_tokens(each)]
            place = kind, tuple(each.shape for each in given)
            if place in self._results:
                representative, result = self._results[place]
                self.left_out[name] = representative, entered
                return result
            outer, self._running = self._running, name
            seen = _Seen("transformer_options" in kwargs, entered)
            self._seen = self.blocks[name] = seen
            try:
                result = forward(*args, **kwargs)
            finally:
                self._running = outer
            self._results[place] = name, result
            return result

        return run

    def attention(
        self,
        func: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The value of each token in place of attention; 0 where others than itself would count."""
        by_head = bool(kwargs.get("skip_reshape"))
        if self._running is not None:
            is_masked = mask is not None and mask.ndim > 1 and mask.shape[-2] > 1
            call = _Call(q.shape[-2], k.shape[-2], is_masked, fingerprints(flat(k, by_head)))
            self.blocks[self._running].calls.append(call)
        own = _by_head(v, q, heads, by_head)
        if q.shape[-2] != own.shape[1]:
            own = own.new_zeros(len(q), q.shape[-2], *own.shape[2:])
        return own.transpose(1, 2) if kwargs.get("skip_output_reshape") else own.flatten(2)


def _cheap(out_features: int) -> Forward:
    """What a linear layer does while it is asked: which token is which shows as well by it."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x[..., torch.arange(out_features, device=x.device) % x.shape[-1]]

    return run


def _by_head(v: Tensor, q: Tensor, heads: int, by_head: bool) -> Tensor:
    """Values as ``[batch, tokens, heads, channels]``, with as many heads as queries."""
    if by_head:
        v = v.transpose(1, 2)
    elif v.ndim == 3:
        v = v.unflatten(2, (-1, q.shape[2] // heads))
    return v if v.shape[2] == heads else v.repeat_interleave(heads // v.shape[2], 2)


class _Memory:
    """What the modules of a model hold beside their weights."""

    def __init__(self, model: nn.Module):
        self._before = [
            (vars(module), name, value, _content(value))
            for module in model.modules()
            for name, value in vars(module).items()
            if name not in _OF_MODULES
        ]
        self._names = [(vars(module), set(vars(module))) for module in model.modules()]

    def restore(self) -> bool:
        """Take back what the model has kept, and return whether there was anything.

        Only what holds tensors counts: the host notes on modules what it has loaded of them.
        """
        keeps = False
        for attributes, name, value, content in self._before:
            now = attributes.get(name)
            if now is not value and _holds_tensors(now):
                attributes[name], keeps = value, True
            elif content is not None and _holds_tensors(_new_in(content, _content(value))):
                _refill(value, content)
                keeps = True
        for attributes, names in self._names:
            for name in set(attributes) - names:
                if _holds_tensors(attributes[name]):
                    del attributes[name]
                    keeps = True
        return keeps


def _content(value: Any) -> list[Any] | dict[Any, Any] | None:
    """A copy of what a list or a mapping holds, or an object of another class; else None."""
    if isinstance(value, list | dict):
        return value.copy()
    is_object = hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | Tensor)
    return dict(vars(value)) if is_object and not callable(value) else None


def _new_in(before: Any, now: Any) -> list[Any]:
    """The values that a list or a mapping did not hold before."""
    known = {id(each) for each in (before.values() if isinstance(before, dict) else before)}
    values = now.values() if isinstance(now, dict) else now
    return [each for each in values if id(each) not in known]


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, list):
        value[:] = content
        return
    held = value if isinstance(value, dict) else vars(value)
    held.clear()
    held.update(content)


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether a value is a tensor or holds any."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, nn.Module | type):
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensors(each, depth - 1) for each in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_tensors(each, depth - 1) for each in value)
    return hasattr(value, "__dict__") and _holds_tensors(vars(value), depth - 1)


def _kind(block: nn.Module) -> Any:
    """What two blocks have in common if they do the same to their tokens, as far as can be seen."""
    shapes = tuple((name, tuple(each.shape)) for name, each in block.named_parameters())
    settings = tuple(
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not any(part in name for part in _NUMBERING)
    )
    return type(block), shapes, settings


def _has_tokens(x: Tensor) -> bool:
    return x.is_floating_point() and x.ndim > 2


def _same_places(
    before: _Watch, after: _Watch, block: str, layouts: Mapping[Any, Layout | None], sides: Sides
) -> bool:
    """Whether the picture's tokens enter a block where they enter the one that stood for it.

    ``layouts`` are those of the other one.
    """
    representative, first = before.left_out[block]
    if after.left_out.get(block, (None,))[0] != representative:
        return False
    _, second = after.left_out[block]
    grids = {layout.spans[0].grid for layout in layouts.values() if layout is not None}

    def places(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[list[list[int]]]:
        all_changes = [changes(*pair).flatten(1) for pair in pairs]
        return [most_changed(each, sides, grid) for each in all_changes for grid in grids]

    stands = before.blocks[representative].entered, after.blocks[representative].entered
    return places(list(zip(*stands, strict=True))) == places(list(zip(first, second, strict=True)))


def _references(inputs: Inputs) -> dict[str, Any]:
    """The conditions that are latents like the one that is sampled, or lists of them, by name."""
    channels = inputs.shape[1]

    def is_latent(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim in (4, 5)
            and value.shape[1] == channels
        )

    found = {}
    for name, value in inputs.conditions.items():
        each = _tensors(value)
        if each and all(map(is_latent, each)):
            found[name] = value
    return found


def _tensors(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _changed_all(references: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [changed(each) for each in value] if isinstance(value, list) else changed(value)
        for name, value in references.items()
    }


def _changed_latent(latent: Tensor, shape: Sequence[int]) -> Tensor:
    """The latent with its pixels changed, but not the sound that it is packed with."""
    if latent.ndim > 3:
        return changed(latent)
    size = prod(shape[1:])
    picture = changed(latent[..., :size].reshape(len(latent), *shape[1:]))
    return torch.cat([picture.flatten(1).view_as(latent[..., :size]), latent[..., size:]], -1)


def _sides(shape: Sequence[int]) -> Sides:
    """Frames, height and width of a latent."""
    return shape[2] if len(shape) == 5 else 1, shape[-2], shape[-1]


def _form(value: Any) -> Any:
    """The form of inputs: what they are but the values of tensors, and the number of samples."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape[1:])
    if isinstance(value, Mapping):
        return tuple((name, _form(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return value if isinstance(value, int | float | str | None) else type(value)


@contextmanager
def _undisturbed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """What compiles does not, and random numbers are afterwards as they were before."""
    devices = [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        if any(each is not uncompiled(each) for each in network.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
