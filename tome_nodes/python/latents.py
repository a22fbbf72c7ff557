"""Whether the latent of each evaluation in a run is where the calls before it led."""

import torch
from torch import Tensor

from ..skipping.trajectory import Trajectory

_MOST_ANSWERS = 8
"""An evaluation of more calls, as of the views of a panorama, is not followed."""


class CalledLatents:
    """The latents of a run, and what calls of a model returned for them.

    What a model returns may be a prediction of any kind: the next latent is a weighted sum of it
    and of the latent.
    """

    def __init__(self) -> None:
        # Nothing is known of the scheduler.
        self._trajectory: Trajectory | None = Trajectory(is_known=False)
        self._shape: torch.Size | None = None
        self._prompts: tuple[int, int] = 0, 1
        self._channels: int | None = None
        self._answers = 0

    def begin(self, latent: Tensor) -> Tensor | None:
        """Begin an evaluation with its noisy latent, ``[batch, ...]``, as its first call has it.

        Returns:
            See :meth:`Trajectory.begin`.
        """
        if self._trajectory is None:
            return None
        if len(latent) != self._prompts[0]:
            self._prompts = len(latent), _prompts_in(latent)
        self._answers = 0
        once = latent[: len(latent) // self._prompts[1], : self._channels]
        self._shape = once.shape
        return self._trajectory.begin(once)

    def note(self, answer: Tensor) -> None:
        """Note what a call returned, ``[batch, ...]``."""
        if self._trajectory is None or self._shape is None:
            return
        if self._channels is None and answer.ndim > 3:
            self._channels = min(self._shape[1], answer.shape[1])
            if self._channels < self._shape[1]:
                # Behind the noisy latent there is a mask, or another picture.
                self._trajectory, self._shape = Trajectory(is_known=False), None
                return
        answer = answer[:, : self._channels]
        is_alike = answer.shape[1:] == self._shape[1:] and len(answer) % self._shape[0] == 0
        parts = answer.split(self._shape[0]) if is_alike else ()
        self._answers += len(parts)
        if not parts or self._answers > _MOST_ANSWERS:
            self._trajectory = None
        else:
            for part in parts:
                self._trajectory.note(part)


def _prompts_in(latent: Tensor) -> int:
    """How often a call has the latents of the pictures, one after the other: for each prompt.

    This waits for the device.
    """
    seen = latent.flatten(1).sum(1).tolist()
    sizes = (size for size in range(1, len(seen) + 1) if len(seen) % size == 0)
    return next(len(seen) // size for size in sizes if seen == seen[:size] * (len(seen) // size))
