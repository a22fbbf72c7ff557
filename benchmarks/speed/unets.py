"""Evaluations of SD 1.5 and SDXL: all methods, at all sizes for which there is time."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

from comfy.model_patcher import ModelPatcher

from benchmarks.rounds import interleaved
from benchmarks.speed.figures import Row
from benchmarks.speed.measure import Subject, look, peak_bytes
from benchmarks.speed.methods import methods
from benchmarks.speed.models import SHAPES, load
from benchmarks.speed.record import Record

EVALUATIONS = 4
"""Evaluations timed in a row."""

ROUNDS = (3, 10)
"""The least and the most rounds of a comparison."""


@dataclass(frozen=True)
class Case:
    """A comparison.

    Attributes:
        model: one of :data:`benchmarks.speed.models.SHAPES`.
        size: side of the picture in pixels.
        seconds: how long rounds beyond the least number may take.
        pictures: how many there are in a batch.
    """

    model: str
    size: int
    seconds: float
    pictures: int = 1

    @property
    def title(self) -> str:
        several = f", {self.pictures} pictures" if self.pictures > 1 else ""
        return f"{self.model}, {self.size}x{self.size}{several}"


CASES = (
    Case("sd15", 2048, 20),
    Case("sd15", 1024, 8),
    Case("sdxl", 1024, 10),
    Case("sdxl", 2048, 15),
    Case("sd15", 1024, 12, pictures=4),
    Case("sdxl", 1024, 12, pictures=4),
    Case("sd15", 512, 8, pictures=8),
    Case("sd15", 768, 8, pictures=4),
    Case("sdxl", 1536, 10),
    Case("sd15", 512, 5),
)
"""Cases for a GPU, the most important first. Several pictures keep a large card as busy as one
picture keeps a small one."""

DRY_CASES = (Case("reduced sd15", 128, 0),)


def run(record: Record, cases: Sequence[Case]) -> None:
    """Measure all cases for which there is time."""
    model = cache(load)
    for case in cases:
        made = partial(_measure, record, case, partial(model, case.model))
        record.compare(case.title, case.seconds / 2, made)


def _measure(record: Record, case: Case, model: Callable[[], ModelPatcher]) -> dict[str, Row]:
    shape, on_gpu = SHAPES[case.model], record.device.type == "cuda"
    subject = Subject(model(), shape.context_channels, case.size, case.pictures)
    (expected,) = subject.run(subject.model, nullcontext())
    patched, rows = {}, {}
    for name, patch in methods(shape.max_downsample, on_gpu).items():
        try:
            clone = patch(subject.model)
            rows[name] = look(subject, clone, expected)
            rows[name]["peak_bytes"] = peak_bytes(subject, clone)
            patched[name] = clone
        except Exception as error:
            record.fail(f"{case.title}: {name}", error)
    evaluations = EVALUATIONS if on_gpu else 1
    runs = {name: partial(subject.time, clone, evaluations) for name, clone in patched.items()}
    least, most = ROUNDS
    seconds = interleaved(runs, most, record.pace(least, case.seconds))
    return {name: rows[name] | {"seconds": taken} for name, taken in seconds.items()}
