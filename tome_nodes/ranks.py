"""How the ranks of torch.distributed that call one model in step agree to skip a call.

Every call of such a model waits for all of its ranks. If one rank skipped a call, or made one more,
the others would wait for ever. So either all ranks skip a call, or none does.

The ranks vote through the store of their process group. A collective would wait until the timeout
of the group, and could be matched with one of the model's own if a rank is out of step.
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
"""How long a rank waits for the others, in seconds."""

_YES = 1 << 20
"""Every vote adds 1 to the count, and a vote in favour adds this as well."""

_TOO_LATE = "too late"
"""The decision of a turn in which not all ranks voted in time."""


def ranks_of(model: nn.Module) -> Sequence[int]:
    """The ranks that a call of a model waits for, in ascending order; empty if it waits for none.

    These ranks, this one among them, share the model's weights (FSDP2, tensor parallel) or its
    sequence (context parallel of diffusers). Ranks that hold replicas do not count. Weights that
    stay gathered after a call are no longer shared.
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
    """Lets the ranks of a model agree on each call; for the calls of one thread."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._is_new = True
        self._is_over = False

    def agree(self, may: bool) -> bool:
        """Whether a call may be skipped or changed: only if ``may`` is true on every rank.

        Ask this before every call. A model on one rank asks nobody, and neither does any model
        while gradients are computed, since every call is whole then. If a rank does not vote in
        time, those that waited for it log that once, and skip nothing from then on.
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
    """Vote once: true if all ranks are in favour, None if one of them did not vote in time.

    A rank that votes against does not wait for the others, unless it is new.

    Args:
        store: the store that the ranks share.
        own: this rank.
        ranks: all ranks that vote, this one among them.
        may: the vote of this rank.
        is_new: whether this rank has not voted on this model yet. It then passes over turns that
            the others have ended without it, for example while it called another model, unpatched.
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
        # All ranks have voted in this turn, so they have read the decision of the one before.
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
        # Not by the store's own wait, which lets no interrupt through.
        time.sleep(min(0.1 * waited, 0.02))
    return True
