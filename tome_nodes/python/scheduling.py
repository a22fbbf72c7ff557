"""The scheduler of a pipeline, as far as it can be known."""

from typing import Any
from weakref import ref


class Scheduling:
    """The current scheduler of a pipeline, or a scheduler alone, or none.

    Attributes:
        is_called: whether a network of the pipeline was called since the last run ended.
    """

    def __init__(self, pipeline: Any = None, scheduler: Any = None):
        """Follow the scheduler of ``pipeline``; without a pipeline, ``scheduler``."""
        # A reference here must not keep the pipeline alive.
        self._pipeline = None if pipeline is None else ref(pipeline)
        self._scheduler = getattr(pipeline, "scheduler", scheduler)
        self.is_called = False
        self._timesteps = self._current_timesteps

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.scheduler)

    @property
    def pipeline(self) -> Any:
        """The pipeline; None if there is none any more."""
        return None if self._pipeline is None else self._pipeline()

    @property
    def scheduler(self) -> Any:
        """The current scheduler; None if there is none."""
        return getattr(self.pipeline, "scheduler", self._scheduler)

    def end_run(self) -> bool:
        """End a run of the pipeline, if there was one; return whether it called no network.

        Without a scheduler, runs are not known.
        """
        # Where a scheduler counts steps, it has one by the end of a run.
        if getattr(self.scheduler, "step_index", 0) is None:
            return False
        before, self._timesteps = self._timesteps, self._current_timesteps
        was_called, self.is_called = self.is_called, False
        # Each run has a tensor of its own.
        return self._timesteps is not before and not was_called

    @property
    def _current_timesteps(self) -> Any:
        return getattr(self.scheduler, "timesteps", None)
