"""The scheduler of a pipeline, as far as it can be known."""

from typing import Any
from weakref import ref


class Scheduling:
    """The current scheduler of a pipeline, or a scheduler alone, or none."""

    def __init__(self, pipeline: Any = None, scheduler: Any = None):
        """Follow the scheduler of ``pipeline``; without a pipeline, ``scheduler``."""
        # A reference here must not keep the pipeline alive.
        self._pipeline = None if pipeline is None else ref(pipeline)
        self._scheduler = getattr(pipeline, "scheduler", scheduler)

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
