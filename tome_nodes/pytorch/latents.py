"""Whether the latent of each evaluation in a run is where the calls before it led."""

from torch import Tensor

from ..forecasting.trajectory import Trajectory

_MOST_ANSWERS = 8
"""An evaluation of more calls, as of the views of a panorama, is not followed."""


class Latents:
    """The latents of a run, and what calls of a model returned for them.

    What a model returns may be a prediction of any kind: the next latent is a weighted sum of it
    and of the latent.
    """

    def __init__(self) -> None:
        self._trajectory: Trajectory | None = Trajectory()
        self._latent: Tensor | None = None
        self._answers: list[Tensor] = []
        self._prompts: tuple[int, int] = 0, 1
        self._channels: int | None = None

    def begin(self, latent: Tensor) -> Tensor | None:
        """Begin an evaluation with its noisy latent, ``[batch, ...]``, as its first call has it.

        Returns:
            A boolean on its device, which is not waited for; None if nothing is known.
        """
        if self._trajectory is None:
            return None
        if self._latent is not None:
            self._trajectory.add(self._latent, self._answers)
        if len(latent) != self._prompts[0]:
            self._prompts = len(latent), _prompts_in(latent)
        # Code outside of the model may change it in place.
        once = latent[: len(latent) // self._prompts[1], : self._channels]
        self._latent, self._answers = once.clone(), []
        return self._trajectory.leads_to(self._latent)

    def note(self, answer: Tensor) -> None:
        """Note what a call returned, ``[batch, ...]``, which must not change from then on."""
        latent = self._latent
        if latent is None or self._trajectory is None:
            return
        # Behind the noisy latent there may be a mask or another picture.
        channels = self._channels = min(latent.shape[1], answer.shape[1])
        latent = self._latent = latent[:, :channels]
        is_alike = answer.shape[2:] == latent.shape[2:] and len(answer) % len(latent) == 0
        if is_alike and len(self._answers) < _MOST_ANSWERS:
            self._answers += answer[:, :channels].split(len(latent))
        else:
            self._trajectory = None


def _prompts_in(latent: Tensor) -> int:
    """How often a call has the latents of the pictures, one after the other: for each prompt.

    This waits for the device.
    """
    seen = latent.flatten(1).sum(1).tolist()
    sizes = (size for size in range(1, len(seen) + 1) if len(seen) % size == 0)
    return next(len(seen) // size for size in sizes if seen == seen[:size] * (len(seen) // size))
