"""Whether a sampler's latent is where its last steps led.

Under any method, the next latent is a weighted sum of the last ones, of the answers to them, and of
noise if the sampler adds some. If anything else acted, such as a node that mirrors the latent or
pastes a part of it back, the answers so far are no guide to the next.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

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

_MOST_NOISE = 1.15
"""The most noise that a sampler adds, over the noise of the latent: LCM adds all of it. The rest is
for chance, and for settings that add a little more."""

_RIDGE = 1e-6
"""Keeps weights small where latents and answers are nearly the same."""


class _Evaluation(NamedTuple):
    """A latent and the answers to it, ``[batch, ...]`` each."""

    latent: Tensor
    answers: tuple[Tensor, ...]


class Trajectory:
    """The last latents of a run, and the answers to them."""

    def __init__(self) -> None:
        self._kept: deque[_Evaluation] = deque(maxlen=_EVALUATIONS)
        self._is_known: Tensor | None = None

    def leads_to(
        self, latent: Tensor, noise: float = 0.0, where: Tensor | None = None
    ) -> Tensor | None:
        """Whether the evaluations so far lead to a latent, in all samples.

        The first latent shows whether the method is one that this can follow. If it is not, they
        lead everywhere.

        Args:
            latent: of the next evaluation, ``[batch, ...]``.
            noise: its noise level if the sampler adds noise; else 0.
            where: whether a number of the latent is the sampler's own, and not put in anew in every
                step, as around a mask; broadcasts over ``latent``. None if all are.

        Returns:
            A boolean on the latent's device, without waiting for it; None if nothing is known.
        """
        if not self._kept or self._kept[-1].latent.shape != latent.shape:
            self._kept.clear()
            return None
        bases = [each for evaluation, answers in self._kept for each in (evaluation, *answers)]
        now = _rows(latent, where)
        rest = now - _projected(now, torch.stack([_rows(each, where) for each in bases], 1))
        counted = torch.ones_like(latent, dtype=torch.float32)
        allowed = _TOLERANCE * now.norm(dim=1)
        allowed += _MOST_NOISE * noise * _rows(counted, where).norm(dim=1)
        leads = (rest.norm(dim=1) <= allowed).all()
        if self._is_known is None:
            self._is_known = leads
        return leads | ~self._is_known

    def add(self, latent: Tensor, answers: Sequence[Tensor]) -> None:
        """Keep an evaluation, whose tensors, ``[batch, ...]``, must not change from then on."""
        self._kept.append(_Evaluation(latent, tuple(answers)))


def has_memory(answer: Tensor, parts: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether guidance adds what it kept of the step before, as with a momentum, in any sample.

    This waits for the device.

    Args:
        answer: a guided answer, ``[batch, ...]``.
        parts: the answers that it was made from, one of each condition.
        before: those of the step before.
    """
    # Some guidance weighs each channel of a video apart.
    now, *others = (_planes(each) for each in (answer, *parts, *before))
    kept = (now - _projected(now, torch.stack(others[: len(parts)], 1))).norm(dim=1)
    left = (now - _projected(now, torch.stack(others, 1))).norm(dim=1)
    least = _LEAST_KEPT * now.norm(dim=1)
    return bool(((kept > least) & (left < _MOST_LEFT * kept)).any())


def _planes(tensor: Tensor) -> Tensor:
    """A tensor as float32, ``[rows, numbers]``: a row for each sample, or channel of a video."""
    return tensor.float().flatten(max(1, tensor.ndim - 3)).flatten(0, -2)


def _rows(tensor: Tensor, where: Tensor | None) -> Tensor:
    """A tensor as float32, ``[batch, numbers]``, and 0 where it does not count."""
    return (tensor if where is None else tensor * where).float().flatten(1)


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
    weights, _ = torch.linalg.solve_ex(gram, found[..., None])
    return (weights / sizes[..., None] * bases).sum(1)
