"""A whole model on merged tokens: its latent is averaged over slots before it and after it.

A block on merged tokens changes all tokens of a slot alike, so what tokens differ in would pass a
transformer unchanged and come out as an error. Here the tokens of a slot enter alike. Of the
denoised latent, the means of slots are new; how tokens differ from them is kept from the last step
on all tokens. Before the first such step, neighbouring tokens blend.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..merging.layout import Grid, Layout, LayoutKey
from ..merging.plan import Plan, of_all_samples, plans_by_frame, plans_of_sequence
from .detail_cache import MOVES, Detail, belongs, fitting
from .engine import Engine

# How far apart neighbouring tokens are in the matching, where the latent has a variance of 1.
# Tokens merge within windows of many tokens, and a slot should not reach across one.
_NEIGHBOUR_DISTANCE = 0.1

# The period of places in tokens: up to half of it, what is farther away is less alike, and windows
# are smaller.
_PERIOD = 64

# Tokens are compared by angle. This far from the origin, the same tokens are alike by angle as by
# distance.
_OFFSET = 10.0

Denoise = Callable[[Tensor], Tensor]
"""Maps a noisy latent to the denoised one."""


class WholeModel:
    """One evaluation of a model whose blocks all run on the same slots of its latent.

    Attributes:
        plan: that of the latent; None if nothing merges.
        batch: the number of samples of the latent.
        failed: why the blocks cannot run so, which is known once the first evaluation has tried;
            else None.
    """

    def __init__(
        self,
        picture: int,
        grid: Grid,
        ratio: float,
        engine: Engine,
        detail: Detail,
        samples_merge_alike: bool = False,
    ):
        """Prepare an evaluation.

        Args:
            picture: the index of the latent among the pictures of the sequence.
            grid: of the latent's tokens.
            ratio: the share of them to merge.
            engine: makes the plans.
            detail: what is kept from step to step.
            samples_merge_alike: whether all samples need the same plan.
        """
        self.plan: Plan | None = None
        self.batch = 0
        self.failed: str | None = None
        self._refused: str | None = None
        self._picture, self._grid = picture, grid
        self._ratio, self._engine, self._detail = ratio, engine, detail
        self._samples_merge_alike = samples_merge_alike
        self._pieces: list[Plan | None] = []
        self._plans: dict[LayoutKey, Plan | None] = {}
        if detail.denoised is None and not detail.is_coarse:
            detail.is_full = True

    def run(self, latent: Tensor, denoise: Denoise) -> Tensor:
        """The denoised latent, of the shape of ``latent``.

        Args:
            latent: the noisy one, ``[batch, channels, height, width]``, with frames before the
                height if it is a video.
            denoise: the model; it may change its blocks' tokens by :meth:`plan_of`.
        """
        denoised = self.leaving(latent, denoise(self.entering(latent)))
        return denoise(latent) if denoised is None else denoised

    def entering(self, latent: Tensor) -> Tensor:
        """What the model is to denoise: the latent with each token the mean of its slot."""
        detail, grid = self._detail, self._grid
        self.batch = len(latent)
        kept = fitting(detail.denoised, latent)
        is_full = detail.is_full or (kept is None and not detail.is_coarse)
        if not is_full and grid.tokens >= self._engine.least_tokens:
            self._match(latent)
        plan = self.plan
        if plan is None:
            return latent
        merged = plan.unmerge(plan.merge(tokens_of(latent, grid)))
        return latent_of(merged, latent.shape, grid)

    def leaving(self, latent: Tensor, denoised: Tensor) -> Tensor | None:
        """The denoised latent, given what the model says; None if it has to run on all tokens."""
        detail, grid, plan = self._detail, self._grid, self.plan
        if plan is None:
            # Whoever gets the answer may change it in place.
            detail.denoised = denoised.clone()
        else:
            if self._refused is not None and not self._plans:
                self.plan, self.failed = None, self._refused
                return None
            # Without a block that ran, another node has computed the answer from the same latent.
            slots = plan.merge(tokens_of(denoised, grid))
            kept = fitting(detail.denoised, latent)
            if kept is None:
                tokens = _blended(plan, slots, latent.shape, grid)
            else:
                own = tokens_of(kept.to(slots.dtype), grid)
                means = plan.merge(own)
                if not belongs(means, slots):
                    self.plan, self.failed = None, MOVES
                    return None
                tokens = plan.add_change(own, means, slots)
            denoised = latent_of(tokens, latent.shape, grid)
        detail.latest = denoised.clone()
        return denoised

    def refuse(self, reason: str) -> None:
        """Note why a block cannot run on merged tokens."""
        self._refused = reason

    def plan_of(self, layout: Layout, start: int, tokens: Tensor) -> tuple[Plan | None, bool]:
        """The plan of a sequence: that of the latent, and new ones for other pictures.

        Returns it, and whether this is the first time.

        Args:
            layout: of the sequence.
            start: where the latent begins in it.
            tokens: ``[batch, tokens, channels]``, by which other pictures are matched.
        """
        is_new = layout.key not in self._plans
        if is_new:
            own = iter(self._pieces)
            pieces = iter(
                [
                    next(own) if span.start == start else self._engine
                    for span in layout.spans
                    for _ in span.grid.parts
                ]
            )

            def plans_of(features: Tensor, grid: Grid) -> list[Plan | None]:
                piece = next(pieces)
                if isinstance(piece, Engine):
                    return piece.plans_of(features, grid, [self._ratio])
                return [piece]

            (self._plans[layout.key],) = plans_of_sequence(layout, tokens, plans_of)
        return self._plans[layout.key], is_new

    def start_in(self, layout: Layout) -> int:
        """Where the latent begins in a sequence."""
        return layout.spans[self._picture].start

    def _match(self, latent: Tensor) -> None:
        """Make the plan of the latent by the latest denoised one, or else by places only."""
        latest = fitting(self._detail.latest, latent)

        def plans_of_grid(features: Tensor, grid: Grid) -> list[Plan | None]:
            return self._engine.plans_of(features.contiguous(), grid, [self._ratio])

        def plans_of(features: Tensor, grid: Grid) -> list[Plan | None]:
            # Not over frames, unless the settings say so: benchmarks/FIDELITY.md.
            is_cut = grid.frames > 1 and self._engine.strategy.config.st == 0
            if is_cut:
                made = plans_by_frame(plans_of_grid, features, grid)
            else:
                made = plans_of_grid(features, grid)
            self._pieces += made
            return made

        layout = Layout.filled_by(self._grid)
        features = _features(latest, self._grid, latent)
        if self._samples_merge_alike:
            features = of_all_samples(features)
        (self.plan,) = plans_of_sequence(layout, features, plans_of)


def tokens_of(latent: Tensor, grid: Grid) -> Tensor:
    """A latent as tokens, each with the values of its patch: ``[batch, tokens, values]``.

    Args:
        latent: ``[batch, channels, height, width]``, with frames before the height if it is a
            video. Sides that are no whole number of patches are extended.
        grid: of the tokens.
    """
    sides, numbers, patch = _cut(latent.shape, grid)
    missing = [
        each * number - side for each, number, side in zip(patch, numbers, sides, strict=True)
    ]
    values = latent.reshape(*latent.shape[:2], *sides)
    if any(missing):
        deep, high, wide = missing
        values = F.pad(values, (0, wide, 0, high, 0, deep), mode="replicate")
    cut = [size for pair in zip(numbers, patch, strict=True) for size in pair]
    values = values.reshape(*values.shape[:2], *cut).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return values.reshape(len(latent), grid.tokens, -1)


def latent_of(tokens: Tensor, shape: Sequence[int], grid: Grid) -> Tensor:
    """The latent of a shape whose tokens, as of :func:`tokens_of`, are given."""
    sides, numbers, patch = _cut(shape, grid)
    values = tokens.reshape(shape[0], *numbers, shape[1], *patch).permute(0, 4, 1, 5, 2, 6, 3, 7)
    extended = [each * number for each, number in zip(patch, numbers, strict=True)]
    frames, height, width = sides
    values = values.reshape(*shape[:2], *extended)[:, :, :frames, :height, :width]
    return values.reshape(shape)


def _blended(plan: Plan, slots: Tensor, shape: Sequence[int], grid: Grid) -> Tensor:
    """The tokens of slots as ``plan.unmerge`` gives them, but smooth, with the same means of slots.

    Each pixel becomes the mean of the 3x3 around it, and each slot then moves back to its mean.

    Args:
        plan: that of the slots.
        slots: ``[batch, slots, values]``.
        shape: that of the latent.
        grid: of the tokens.
    """
    pixels = latent_of(plan.unmerge(slots), shape, grid)
    still = pixels.transpose(1, 2).flatten(0, 1) if pixels.ndim == 5 else pixels
    smooth = F.avg_pool2d(F.pad(still, (1, 1, 1, 1), mode="replicate"), 3, 1)
    if pixels.ndim == 5:
        smooth = smooth.unflatten(0, (shape[0], shape[2])).transpose(1, 2)
    tokens = tokens_of(smooth, grid)
    return tokens + plan.unmerge(slots - plan.merge(tokens))


def _cut(shape: Sequence[int], grid: Grid) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Frames, height and width of a latent, of its grid, and of a patch that is one token."""
    sides = shape[2] if len(shape) == 5 else 1, shape[-2], shape[-1]
    numbers = grid.frames, grid.height, grid.width
    return sides, numbers, [-(-side // number) for side, number in zip(sides, numbers, strict=True)]


def _features(latest: Tensor | None, grid: Grid, like: Tensor) -> Tensor:
    """What the tokens of a latent are matched by, ``[batch, tokens, channels]`` float32.

    ``like`` has their batch and device.
    """
    places = torch.meshgrid(
        *(
            torch.arange(side, device=like.device)
            for side in (grid.frames, grid.height, grid.width)
        ),
        indexing="ij",
    )
    radius = _NEIGHBOUR_DISTANCE * _PERIOD / math.tau
    angles = torch.stack(places, 3).flatten(0, 2) * (math.tau / _PERIOD)
    apart = torch.cat([radius * angles.cos(), radius * angles.sin()], 1)
    features = F.pad(apart, (0, 1), value=_OFFSET).expand(len(like), -1, -1)
    if latest is None:
        return features
    values = tokens_of(latest, grid).float()
    variance = values.var(1, keepdim=True).sum(2, keepdim=True)
    return torch.cat([values * variance.clamp_min(1e-12).rsqrt(), features], 2)
