"""Ask a transformer without a record where its picture is in the sequence of its tokens.

To ask is to evaluate it twice, the second time on a changed latent, while no token sees another
(:mod:`tome_nodes.patching.tokenwise`). The keys that differ belong to the picture
(:mod:`tome_nodes.merging.picture_search`). This takes about a hundredth of the time of an
evaluation, once for each form of the inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..merging.layout import Layout, Picture, Span
from ..merging.picture_search import Sides, changes, most_changed, span_of
from .blocks import Layouts, uncompiled
from .evaluation import lock_of
from .tokenwise import Call, TokenwiseEvaluation

_MOST_KEPT = 64

_answers: WeakKeyDictionary[nn.Module, dict[Any, "Answer"]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Answer:
    """Where the pictures are in the sequences of a model, for inputs of one form.

    Attributes:
        layouts: by the name of each block that attends to a picture, and by the number of queries
            and keys of an attention; None where there is no picture.
        stacks: the names of the lists that hold these blocks.
        passes_options: whether the attention of these blocks reads the transformer options that the
            blocks are given.
        obstacle: why nothing can merge; None if something can.
    """

    layouts: Layouts = field(default_factory=dict)
    stacks: tuple[str, ...] = ()
    passes_options: bool = True
    obstacle: str | None = None

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """All pictures, each once for every attention that it is in."""
        return tuple(
            Picture(span.grid)
            for layouts in self.layouts.values()
            for layout in layouts.values()
            if layout is not None
            for span in layout.spans
        )


def kept_answer(network: nn.Module, form: Any, ask: Callable[[], Answer]) -> Answer:
    """The answer of a network for inputs of some form; it is asked once for each form.

    Args:
        network: the transformer.
        form: the form of its inputs, see :func:`form_of`.
        ask: asks the transformer.
    """
    with lock_of(network):
        kept = _answers.setdefault(network, {})
        if form not in kept:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[form] = ask()
        return kept[form]


def compared(
    name: str,
    watched: Callable[[], Sequence[TokenwiseEvaluation]],
    sides: Sides,
    references: Sequence[Sides],
    batch: int,
    network: nn.Module,
    device: torch.device,
    interrupts: tuple[type[BaseException], ...] = (),
) -> Answer:
    """Find the pictures by comparing evaluations.

    Args:
        name: the name of the model's class.
        watched: evaluates the model unchanged, then with a changed latent, then, if there are
            references, with changed references.
        sides: the sides of the latent.
        references: the sides of each reference.
        batch: the number of samples.
        network: the model that is evaluated.
        device: the device it is on.
        interrupts: the errors by which a host ends a run.
    """
    try:
        with torch.no_grad(), _undisturbed(network, device):
            before, after, *others = watched()
        with_references = others[0] if others else None
        return _answer(name, before, after, with_references, sides, references, batch)
    except interrupts:
        raise
    except Exception as error:
        # Asking may fail where the model itself does not. Then only merging is lost.
        why = f"{type(error).__name__}: {error}"
        return Answer(obstacle=f"where the picture of a {name} is could not be asked ({why})")


def _answer(
    name: str,
    before: TokenwiseEvaluation,
    after: TokenwiseEvaluation,
    with_references: TokenwiseEvaluation | None,
    sides: Sides,
    references: Sequence[Sides],
    batch: int,
) -> Answer:
    """The answer from evaluations of the model as it is, with a changed latent, and with changed
    references.
    """
    if any(each.has_kept for each in (before, after, with_references) if each is not None):
        return Answer(obstacle=f"a {name} keeps something from one evaluation to the next")
    if not any(seen.calls for seen in before.blocks.values()):
        return Answer(obstacle=f"a {name} {before.unreached}")
    found: dict[str, dict[tuple[int, int], Layout | None]] = {}
    reasons: list[str] = []
    for block in before.order:
        if block in before.left_out:
            representative, _ = before.left_out[block]
            if not _same_places(before, after, block, found[representative], sides, batch):
                # The layouts of the block that stood for this one do not hold for this one.
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
            layout, reason = _layout(call, later, referring, batch, sides, references)
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
        before.blocks[block].reads_own_options for block in merging if block in before.blocks
    )
    return Answer(merging, tuple(stacks), passes_options)


def _without_refiners(found: Layouts) -> Layouts:
    """Only the layouts of the lists of blocks with the longest sequence.

    Other lists hold few blocks, such as refiners, which prepare the picture before text joins it.
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
    call: Call,
    later: Call | None,
    referring: Call | None,
    batch: int,
    sides: Sides,
    references: Sequence[Sides],
) -> tuple[Layout | None, str | None]:
    """Where the pictures are in one attention, or why it has none that can merge.

    The calls are of the same attention: unchanged, with the latent changed, and with the references
    changed. Both results are None if its keys do not depend on the latent.
    """
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
    """The spans of references, in order, until one is not laid out row by row."""
    change[:, latent.start : latent.stop] = 0
    for sides in references:
        span = span_of(change, sides, others_follow=True)
        if span is None:
            return
        change[:, : span.stop] = 0
        yield span


def _same_places(
    before: TokenwiseEvaluation,
    after: TokenwiseEvaluation,
    block: str,
    layouts: Mapping[Any, Layout | None],
    sides: Sides,
    batch: int,
) -> bool:
    """Whether the picture's tokens enter a block in the same places as its representative.

    The representative is the block that ran in its place; ``layouts`` are those of the
    representative.
    """
    representative, first = before.left_out[block]
    if after.left_out.get(block, (None,))[0] != representative:
        return False
    _, second = after.left_out[block]
    grids = {layout.spans[0].grid for layout in layouts.values() if layout is not None}

    def places(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[list[int]]:
        return [
            most_changed(changes(*pair), sides, grid, batch)
            for pair in zip(one, other, strict=True)
            for grid in grids
        ]

    stood = before.blocks[representative].entered, after.blocks[representative].entered
    return places(*stood) == places(first, second)


def sides_of(shape: Sequence[int]) -> Sides:
    """Frames, height and width of a latent of some shape."""
    return shape[2] if len(shape) == 5 else 1, shape[-2], shape[-1]


def form_of(value: Any) -> Any:
    """The form of inputs: everything but the values of tensors and the number of samples."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape[1:])
    if isinstance(value, Mapping):
        return tuple((name, form_of(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(form_of, value))
    return value if isinstance(value, int | str | None) else type(value)


@contextmanager
def _undisturbed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Meanwhile nothing is compiled; afterwards the random generators are as they were before."""
    devices = [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        if any(each is not uncompiled(each) for each in network.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
