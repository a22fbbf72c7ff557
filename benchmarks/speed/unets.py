"""The UNets of SD 1.5 and SDXL: all methods, at all sizes for which there is time."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from comfy.model_patcher import ModelPatcher

from benchmarks.rounds import interleaved
from benchmarks.speed import checks, figures
from benchmarks.speed.measure import Subject, first_look, launches, merged_in_words
from benchmarks.speed.methods import Method, methods
from benchmarks.speed.models import REDUCED, SHAPES, Shape, load
from benchmarks.speed.record import Record, say

RATIO = 0.5
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
        is_counted: whether launches are counted.
        is_small: whether the model is a small version of the published one.
        pictures: how many there are in a batch.
        methods: the names of those to measure; empty for all.
    """

    model: str
    size: int
    seconds: float
    is_counted: bool = False
    is_small: bool = False
    pictures: int = 1
    methods: Sequence[str] = ()


ONE_EVALUATION = (
    *(f"ideal {scope}" for scope in ("k,v", "attn", "stack")),
    *("core TomePatchModel", "tomesd attn", "ToDo"),
    *(f"ours window {scope}" for scope in ("attn", "stack")),
    "preset balanced",
)
"""Methods measured on a CPU, by one evaluation."""

CASES = (
    Case("sd15", 2048, 20),
    Case("sd15", 1024, 8, is_counted=True),
    Case("sdxl", 1024, 10, is_counted=True),
    Case("sdxl", 2048, 15),
    Case("sd15", 1024, 12, pictures=4),
    Case("sdxl", 1024, 12, pictures=4),
    Case("sd15", 512, 8, pictures=8),
    Case("sd15", 768, 8, pictures=4),
    Case("sdxl", 1536, 10),
    Case("sd15", 512, 5),
)
"""Cases for a GPU, the most important first: 4½ minutes on an H100. Several pictures keep a large
card as busy as one picture keeps a small one."""

DRY_CASES = (Case("sd15", 128, 0, is_counted=True, is_small=True),)

CPU_CASES = (
    Case("sd15", 512, 60, is_counted=True, methods=ONE_EVALUATION),
    Case("sdxl", 512, 60, is_counted=True, methods=ONE_EVALUATION),
)
QUICK_CASES = (
    Case("sd15", 256, 5, is_counted=True, is_small=True, methods=ONE_EVALUATION),
    Case("sdxl", 320, 5, is_counted=True, is_small=True, methods=ONE_EVALUATION),
)

_CHECK_SECONDS = 60.0


class Prepared(NamedTuple):
    """A model, and the methods that passed the checks on it."""

    model: ModelPatcher
    shape: Shape
    methods: Sequence[Method]


def run(record: Record, cases: Sequence[Case]) -> int:
    """Measure all cases for which there is time."""
    result = record.result
    result |= {"ratio": RATIO, "checks": {}, "runs": []}
    prepared: dict[tuple[str, ...], Prepared | None] = {}
    for case in cases:
        needed = case.model, *case.methods
        if needed not in prepared:
            make = partial(_prepare, record, case)
            name = f"{case.model}: loading and checking"
            prepared[needed] = record.attempt(name, _CHECK_SECONDS, make)
        with_model = prepared[needed]
        if with_model is not None:
            compared = partial(_compare, record, case, with_model)
            title = figures.title(_about(case, with_model))
            row = record.attempt(title, case.seconds / 2, compared, result["runs"])
            if row is not None:
                say("\n" + figures.table(row) + "\n")
    return record.finish(goals(result["runs"]))


def goals(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Times faster by model, size and preset."""
    reached: dict[str, Any] = {"runs": len(runs)}
    for row, name in product(runs, ("balanced", "fast")):
        if f"preset {name}" in row["methods"]:
            pictures = row["batch"] // 2
            batch = f"x{pictures}" if pictures > 1 else ""
            key = f"{row['model']}_{row['size']}{batch}_{name}"
            reached[key] = figures.speed_up(row, f"preset {name}")
    return reached


def _prepare(record: Record, case: Case) -> Prepared:
    """Load the model of a case, and check its methods on it."""
    name = case.model
    shape = (REDUCED if case.is_small else SHAPES)[name]
    model = load(shape, record.device)
    # A small picture is enough for a check on a CPU; on a GPU it should be like the timed ones.
    size = 512 if record.device.type == "cuda" else 64 if case.is_small else 128
    subject = Subject(model, shape.context_channels, size)
    dtype = model.model.get_dtype_inference()
    (expected,) = subject.run(subject.model, nullcontext())
    said = record.result["checks"][name] = {}
    right = []
    for method in methods(RATIO, shape.max_downsample, record.device):
        if case.methods and method.name not in case.methods:
            continue
        try:
            checks.check_wiring(method, subject, expected)
            checks.check_plan(method, record.device, dtype)
        except Exception as error:
            said[method.name] = f"{type(error).__name__}: {error}"
            record.result["failed"][f"{name}: {method.name}"] = said[method.name]
            say(f"  WRONG: {method.name}: {said[method.name]}")
        else:
            said[method.name] = "right"
            right.append(method)
        record.write()
    return Prepared(model, shape, right)


def _compare(record: Record, case: Case, prepared: Prepared) -> dict[str, Any]:
    channels = prepared.shape.context_channels
    subject = Subject(prepared.model, channels, case.size, case.pictures)
    patched: dict[str, ModelPatcher] = {"unpatched": subject.model}
    rows: dict[str, dict[str, Any]] = {"unpatched": {}}
    for method in prepared.methods:
        patched[method.name] = method.patch(subject.model)
        rows[method.name] = {"ideal": method.ideal}
    refused: dict[str, str] = {}
    plain: Any = None
    for name, row in rows.items():
        try:
            output, row["peak_bytes"], (merged, blocks) = first_look(subject, patched[name])
            plain = output if plain is None else plain
            row["error"] = checks.difference(output, plain)
            if name != "unpatched":
                row["merged"] = merged_in_words(merged, blocks)
            if case.is_counted:
                row |= launches(subject, patched[name])
            if case.is_counted and merged:
                added = row["launches"] - rows["unpatched"]["launches"]
                row["launches_per_block"] = added / merged
        except Exception as error:
            if name == "unpatched":
                raise
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            del patched[name]
    least, most = ROUNDS
    evaluations = EVALUATIONS if record.device.type == "cuda" else 1
    runs = {name: partial(subject.time, model, evaluations) for name, model in patched.items()}
    seconds = interleaved(runs, most, record.pace(least, case.seconds))
    return {
        **_about(case, prepared),
        "repeats": len(seconds["unpatched"]),
        "evaluations": evaluations,
        "refused": refused,
        "methods": {name: rows[name] | {"seconds": taken} for name, taken in seconds.items()},
    }


def _about(case: Case, prepared: Prepared) -> dict[str, Any]:
    """What distinguishes a comparison from others."""
    return {
        "model": case.model,
        "note": prepared.shape.note,
        "size": case.size,
        "batch": 2 * case.pictures,
        "dtype": str(prepared.model.model.get_dtype_inference()).removeprefix("torch."),
    }
