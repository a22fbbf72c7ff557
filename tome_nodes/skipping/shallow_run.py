"""The evaluations of a sampling run, some of which are shallow."""

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from threading import Lock

import torch
from torch import Tensor

from .. import reasons
from .features import Features
from .plan import (
    FIRST,
    LEAST_OF_THREE,
    leaves_grain,
    shortest,
    swings,
    whole_evaluations,
)
from .skipping import Skipping

log = logging.getLogger("tome_nodes")


class ShallowRun(Skipping):
    """Decides which evaluations of one sampling run are shallow, and keeps features for them.

    Several threads may call the model in one evaluation.

    Attributes:
        is_shallow: whether the current evaluation is shallow, as long as all that it needs is kept.
    """

    nothing_skipped = "no step was shallow"

    def __init__(self, ratio: float, sampler: str):
        """``sampler`` is the name of the sampler, and whatever else tells if it adds noise."""
        super().__init__()
        self.is_shallow = False
        self._why_whole = reasons.NEVER_SHALLOW
        self._ratio, self._sampler = ratio, sampler
        self._features = Features()
        self._lock = Lock()
        self._calls: Counter[Hashable] = Counter()
        self._count = 0
        self._place = 0.0
        self._whole: frozenset[int] = frozenset()
        self._followed: list[Tensor] = []

    def too_short(self, count: int) -> reasons.Reason | None:
        """Why none of so many evaluations would be shallow, as they are few; None if one would."""
        least = shortest(self._ratio)
        return reasons.too_short_for_shallow(count, least) if count < least else None

    @property
    def reason(self) -> reasons.Reason:
        return self.obstacle or self._why_whole

    def plan(self, levels: Sequence[float]) -> None:
        """Plan a run; all evaluations are whole before that is called.

        ``levels`` are the logarithms of signal to noise of its evaluations.
        """
        self._count = len(levels)
        ratio = self._ratio
        if 0 < self._count < LEAST_OF_THREE and swings(self._sampler, levels):
            ratio = 0.0
            self._why_whole = reasons.too_short_for_shallow(self._count, LEAST_OF_THREE)
        self._whole = whole_evaluations(ratio, levels, leaves_grain(self._sampler))

    def begin(self, index: int, place: float, may_be_shallow: bool) -> None:
        """Begin an evaluation, in which the model may be called several times.

        Args:
            index: its number, from 0.
            place: the logarithm of signal to noise.
            may_be_shallow: whether the settings allow that.
        """
        self._calls.clear()
        self._place = place
        is_planned = FIRST <= index < self._count and index not in self._whole
        self.is_shallow = is_planned and may_be_shallow and self.obstacle is None

    def follow(self, leads: Tensor | None) -> None:
        """Note whether the evaluations before this one led to its latent, None if nothing is known.

        If any since the last shallow one did not, a shallow one is whole, and nothing is kept.
        """
        if leads is not None:
            self._followed.append(leads)
        # Before a shallow evaluation only, as this waits for the GPU.
        if self.is_shallow and self._followed:
            if not torch.stack(self._followed).all():
                self.clear()
            self._followed.clear()

    def keys_of(
        self, names: Sequence[Hashable], shape: Sequence[int], device: torch.device
    ) -> list[Hashable] | None:
        """What tells the parts of a call of the model from the others of its evaluation, in order.

        A part may be evaluated several times, in areas or with something left out.

        Args:
            names: of the parts, which are as large as each other.
            shape: of the latent that the model gets, ``[samples, channels, height, width]``.
            device: the device that it is on.

        Returns:
            The keys; None if the samples cannot be dealt out to the parts, or if the rest of the
            run is whole.
        """
        if self.obstacle is None and torch.is_grad_enabled():
            super().stop(reasons.GRADIENTS)
        if self.obstacle is not None or shape[0] % len(names):
            return None
        keys: list[Hashable] = []
        with self._lock:
            for name in names:
                key = (name, device, shape[0] // len(names), *shape[1:])
                keys.append((*key, self._calls[key]))
                self._calls[key] += 1
        return keys

    def given(self, keys: Sequence[Hashable]) -> Tensor | None:
        """What takes the place of what would come up in a call; None if the call is whole.

        Then the rest of the evaluation is whole, too.
        """
        with self._lock:
            given = self._features.at(keys, self._place) if self.is_shallow else None
            # Else a prompt that comes back would stay whole beside the others, which are shallow.
            self.is_shallow = given is not None
        return given

    @property
    def keeps_features(self) -> bool:
        """Whether any features are kept."""
        return bool(self._features)

    def keep(self, keys: Sequence[Hashable], came: Tensor | None) -> None:
        """Keep what came up in a whole call that has ended well.

        Nothing came up if other code ran in place of the deep blocks.
        """
        if came is None:
            self._why_whole = reasons.NOT_CALLED
        elif self.obstacle is None:
            with self._lock:
                self._features.keep(keys, self._place, came)

    def run_whole(self, why: reasons.Reason) -> None:
        """Run the rest of this evaluation whole, which would be shallow."""
        self.is_shallow = False
        self._why_whole = why

    def stop(self, why: reasons.Reason) -> None:
        """Run the rest of the run whole after an error, and drop what is kept."""
        log.warning("[ToMe] %s; the rest of this run goes on without shallow steps", why)
        super().stop(why)

    def clear(self) -> None:
        """Drop what is kept, so that the rest of the evaluation is whole."""
        self.is_shallow = False
        with self._lock:
            self._features.clear()
