"""Whether a sampler's latent is where its last steps led, and whether guidance has a memory.

Under any method, the next latent is a weighted sum of the last ones, of the answers to them, and of
noise if the sampler adds some. If anything else acted, such as a node that mirrors the latent or
pastes a part of it back, the answers so far are no guide to the next.

Some of the numbers of a latent tell, so little is kept, and there is little to compute.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

_EVALUATIONS = 3
"""How many evaluations make a latent. Samplers that look back further differ by less than
``_TOLERANCE``."""

_TOLERANCE = 0.03
"""The largest share of a latent that may come from elsewhere."""

_LEAST_KEPT, _MOST_LEFT = 0.003, 0.35
"""Guidance has a memory if more than the first share of its answer is no weighted sum of its parts,
and of that, less than the second is still none with the parts of the step before. A momentum leaves
0.3 or less in some early step; nodes that guide without one leave 0.45 or more in all."""

_JUMP = 0.5
"""The scale of guidance jumps if it changes by more than this share of itself. On the exact
denoiser, that of APG, which limits how much it adds, changes by 0.3 to 0.5."""

_MOST_NOISE = 1.15
"""The most noise that a sampler adds, over the noise of the latent: LCM adds all of it. The rest is
for chance, and for settings that add a little more."""

_RIDGE = 1e-6
"""Keeps weights small where latents and answers are nearly the same."""

_NUMBERS = 1 << 16
"""About so many numbers of a sample are looked at."""

_SOLVING = frozenset({"cpu", "cuda", "xpu"})
"""Devices that solve equations without being waited for, in all releases of PyTorch."""


class Trajectory:
    """The last latents of a run, and the answers to them."""

    def __init__(self, is_known: bool = True):
        """Follow a sampler; ``is_known`` is whether its method is one that this can follow.

        Else the first two latents that should follow show whether it is. If neither does, the
        evaluations lead everywhere.
        """
        self._kept: deque[list[Tensor]] = deque(maxlen=_EVALUATIONS)
        self._shape: torch.Size | None = None
        self._unknown = 0 if is_known else 2
        self._can_follow: Tensor | None = None

    @torch.no_grad()
    def begin(
        self, latent: Tensor, noise: float = 0.0, where: Tensor | None = None
    ) -> Tensor | None:
        """Begin an evaluation: whether the ones before lead to its latent, in all samples.

        Args:
            latent: the noisy latent, ``[batch, ...]``.
            noise: its noise level if the sampler adds noise; else 0.
            where: whether a number of the latent is the sampler's own, and not put in anew in every
                step, as around a mask; broadcasts over ``latent``. None if all are.

        Returns:
            A boolean on the latent's device, which is not waited for if it can solve equations;
            None if nothing is known.
        """
        if self._shape != latent.shape:
            self._kept.clear()
            self._shape = latent.shape
        now = _rows(latent, where)
        bases = [each for evaluation in self._kept for each in evaluation]
        self._kept.append([now])
        if not bases:
            return None
        rest = now - _projected(now, torch.stack(bases, 1))
        allowed = _TOLERANCE * now.norm(dim=1)
        if noise:
            own = _rows(torch.ones_like(latent) if where is None else where.expand_as(latent))
            allowed += _MOST_NOISE * noise * own.norm(dim=1)
        leads = (rest.norm(dim=1) <= allowed).all()
        if self._unknown:
            self._unknown -= 1
            self._can_follow = leads if self._can_follow is None else self._can_follow | leads
        return leads if self._can_follow is None else leads | ~self._can_follow

    @torch.no_grad()
    def note(self, answer: Tensor, where: Tensor | None = None) -> None:
        """Note an answer to the latest latent, ``[batch, ...]``; for ``where``, see ``begin``."""
        self._kept[-1].append(_rows(answer, where))


@torch.no_grad()
def has_memory(answer: Tensor, parts: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether guidance adds what it kept of the step before, as with a momentum, in any sample.

    This waits for the device.

    Args:
        answer: a guided answer, ``[batch, ...]``.
        parts: the answers that it was made from, one of each condition.
        before: those of the step before.
    """
    # Some guidance weighs each channel of a video apart.
    now, *others = (_rows(_planes(each)) for each in (answer, *parts, *before))
    kept = (now - _projected(now, torch.stack(others[: len(parts)], 1))).norm(dim=1)
    left = (now - _projected(now, torch.stack(others, 1))).norm(dim=1)
    least = _LEAST_KEPT * now.norm(dim=1)
    return bool(((kept > least) & (left < _MOST_LEFT * kept)).any())


@torch.no_grad()
def scale_of(answer: Tensor, parts: Sequence[Tensor]) -> float | None:
    """The scale of guidance by two answers; None if it does more or other than to scale.

    This waits for the device, once.

    Args:
        answer: a guided answer, ``[batch, ...]``.
        parts: the answers that it was made from, one of each condition; the second with scale 0.
    """
    if len(parts) != 2:
        return None
    now, first, second = (_rows(each) for each in (answer, *parts))
    along = first - second
    scale = ((now - second) * along).sum() / along.square().sum()
    rest = (now - torch.lerp(second, first, scale)).norm()
    found, other, least = torch.stack([scale, rest, _LEAST_KEPT * now.norm()]).tolist()
    return float(found) if other <= least else None


def jumps(before: float, now: float) -> bool:
    """Whether the scale of guidance is far from that of the step before."""
    return abs(now - before) > _JUMP * max(abs(now), abs(before), 1.0)


def _planes(tensor: Tensor) -> Tensor:
    """A tensor as ``[rows, numbers]``: a row for each sample, or for each channel of a video."""
    return tensor.flatten(max(1, tensor.ndim - 3)).flatten(0, -2)


def _rows(tensor: Tensor, where: Tensor | None = None) -> Tensor:
    """Some numbers of each sample as float32, ``[batch, numbers]``; 0 where they do not count."""
    counted = tensor if where is None else tensor * where
    flat = counted.flatten(1)
    step = max(1, flat.shape[1] // _NUMBERS)
    # A step that fits into a row would always meet the same columns.
    while step > 1 and math.gcd(step, flat.shape[1]) > 1:
        step += 1
    return flat[:, ::step].to(torch.float32, copy=True)


def _projected(rows: Tensor, bases: Tensor) -> Tensor:
    """The part of some rows that is a weighted sum of those of their bases.

    The rows are ``[batch, numbers]``, and the bases ``[batch, count, numbers]``.
    """
    count = bases.shape[1]
    # No matrix product, which may be less exact on a GPU.
    gram = torch.stack([(bases * bases[:, at, None]).sum(2) for at in range(count)], 1)
    sizes = gram.diagonal(dim1=1, dim2=2).sqrt().clamp(min=1e-20)
    gram = gram / sizes[:, :, None] / sizes[:, None]
    gram = gram + _RIDGE * torch.eye(count, device=rows.device)
    found = (bases * rows[:, None]).sum(2) / sizes
    solving = rows.device if rows.device.type in _SOLVING else torch.device("cpu")
    weights, _ = torch.linalg.solve_ex(gram.to(solving), found[..., None].to(solving))
    return (weights.to(rows.device) / sizes[..., None] * bases).sum(1)
