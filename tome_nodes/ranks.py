"""The ranks of torch.distributed that call one model in step, and what they agree on.

Every call of such a model waits for all its ranks. If one of them left out a call, or made one
more, the others would wait for ever, so they do that together or not at all.

They agree through the store that their process group was made with. A collective would wait as long
as the group allows, and could meet one of the model's own if a rank is out of step.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from . import reasons

log = logging.getLogger("tome_nodes")

PATIENCE = 120.0
"""For so many seconds, a rank waits for the others."""

_YES = 1 << 20
"""What a vote for it adds to the number of votes."""

_TOO_LATE = "too late"
"""What is decided in a turn to which not all ranks came in time."""


def ranks_of(model: nn.Module) -> Sequence[int]:
    """The ranks that a call of a model waits for, this one among them, in order; else none.

    They are those that share its weights (FSDP2, tensor parallel) or its sequence (context parallel
    of diffusers), but not those with replicas. Weights that stay gathered after a call are not
    shared any more.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return ()
    weights: Any = model.parameters()
    layouts = {
        (weight.device_mesh, tuple(not each.is_replicate() for each in weight.placements))
        for weight in weights
        if hasattr(weight, "device_mesh")
    }
    found = {rank for mesh, is_split in layouts for rank in _ranks_along(mesh, is_split)}
    config = getattr(getattr(model, "_parallel_config", None), "context_parallel_config", None)
    mesh = getattr(config, "_flattened_mesh", None)
    if mesh is not None:
        found.update(mesh.mesh.flatten().tolist())
    return sorted(found) if len(found) > 1 else ()


def _ranks_along(mesh: Any, is_split: Sequence[bool]) -> list[int]:
    """The ranks that differ from this one only along the dimensions that weights are split over."""
    here = zip(is_split, mesh.get_coordinate(), strict=True)
    ranks: list[int] = (
        mesh.mesh[tuple(slice(None) if split else at for split, at in here)].flatten().tolist()
    )
    return ranks


class Ranks:
    """What the ranks of a model agree on, in the calls of one thread."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._is_new = True
        self._is_over = False

    def agree(self, may: bool) -> bool:
        """Whether a call may be left out or changed, which is so if it ``may`` on every rank.

        It is to be asked before every call. Where a model has one rank, nobody is asked, nor where
        gradients are computed, under which every call is whole. If another rank does not come, all
        that wait for it go on without, and say so once.
        """
        ranks = () if torch.is_grad_enabled() else ranks_of(self._model)
        if not ranks:
            return may
        if self._is_over:
            return False
        try:
            # Some PyTorch has no torch.distributed, and later ones may have another name for it.
            from torch.distributed.distributed_c10d import _get_default_store

            store, own = _get_default_store(), distributed.get_rank()
            all_may, self._is_new = voted(store, own, ranks, may, self._is_new), False
            why = f"not all ranks of this model came to this step within {PATIENCE:g} s"
        except Exception as error:
            # The store ends with the process that holds it.
            all_may, why = None, f"the ranks cannot agree: {type(error).__name__}: {error}"
        if all_may is None:
            self._is_over = True
            log.warning("[ToMe] %s", reasons.alone(why))
        return all_may is True


def voted(
    store: Any, own: int, ranks: Sequence[int], may: bool, is_new: bool = False
) -> bool | None:
    """Whether all of some ranks vote for it; None on all that wait if one did not vote in time.

    A rank that votes against it does not wait, unless it is new.

    Args:
        store: one that they share.
        own: this rank.
        ranks: all of them.
        may: its vote.
        is_new: whether it has not voted on this model yet, and so passes over turns that the others
            have ended without it, as when it called another one unpatched.
    """
    group = f"tome_nodes/{','.join(map(str, ranks))}"
    turn = store.add(f"{group}/{own}", 1)
    while is_new and store.check(_keys(group, turn)[-1:]):
        turn = store.add(f"{group}/{own}", 1)
    votes, decided, decision = _keys(group, turn)
    so_far = store.add(votes, 1 + _YES * may)
    is_last = so_far % _YES == len(ranks)
    if is_last or not (may or is_new):
        _decide(store, decided, decision, "all" if so_far // _YES == len(ranks) else "not all")
    elif not _comes(store, decision):
        _decide(store, decided, decision, _TOO_LATE)
    word = store.get(decision).decode()
    if is_last:
        # All know of the turn before, as they have come to this one.
        for key in _keys(group, turn - 1):
            store.delete_key(key)
    return None if word == _TOO_LATE else word == "all"


def _keys(group: str, turn: int) -> Sequence[str]:
    return [f"{group}/{name}/{turn}" for name in ("votes", "decided", "decision")]


def _decide(store: Any, decided: str, decision: str, word: str) -> None:
    """Decide, unless another rank has."""
    if store.add(decided, 1) == 1:
        store.set(decision, word)


def _comes(store: Any, key: str) -> bool:
    """Whether a key is set in time."""
    begun = time.monotonic()
    while not store.check([key]):
        waited = time.monotonic() - begun
        if waited > PATIENCE:
            return False
        # A store that waits itself lets no interrupt through.
        time.sleep(min(0.1 * waited, 0.02))
    return True
