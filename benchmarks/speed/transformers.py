"""Blocks of transformers at their real lengths, whole runs, and ways to weigh keys."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from comfy.model_patcher import ModelPatcher
from models.comfyui import build_class
from torch import Tensor

from benchmarks.rounds import interleaved
from benchmarks.speed import checks, weighing, whole_runs
from benchmarks.speed.figures import KEYS, speed_up
from benchmarks.speed.measure import Evaluations, first_look
from benchmarks.speed.methods import ALWAYS, HostMethod, IdealStrategy
from benchmarks.speed.published import Block, inputs
from benchmarks.speed.record import Record, say
from benchmarks.speed.tried import tried
from benchmarks.speed.whole_runs import WholeRun
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

LEAST_ROUNDS, ROUNDS = 3, 7

CPU_BLOCKS = (
    Block("Z-Image", "1024x1024", (16, 128, 128)),
    Block("Flux", "1024x1024", (16, 128, 128)),
    Block("Qwen-Image", "1024x1024", (16, 1, 128, 128)),
    Block("Wan 14B", "640x384, 9 frames", (16, 3, 48, 80)),
    Block("Wan 1.3B", "480p, 81 frames", (16, 21, 60, 104)),
)
QUICK_BLOCKS = (
    Block("Z-Image", "320x256", (16, 40, 32)),
    Block("Flux", "320x256", (16, 40, 32)),
    Block("Wan 1.3B", "320x256, 17 frames", (16, 5, 40, 32)),
)
DRY_BLOCKS = (
    Block("Wan 1.3B", "tiny", (16, 5, 16, 20), "wan21"),
    Block("Z-Image", "tiny", (16, 40, 32), "z_image"),
    Block("Flux", "tiny", (16, 40, 32), "flux"),
)

Measure = Callable[[], dict[str, Any]]
InWords = Callable[[Mapping[str, Any]], str]

_WAY_SECONDS = 20.0
_BLOCK_SECONDS = 45.0
_RUN_SECONDS = 60.0


def run(
    record: Record,
    blocks: Sequence[Block],
    runs: Sequence[WholeRun],
    shapes: Sequence[weighing.Shape] = (),
) -> int:
    """Measure blocks, whole runs and ways to weigh keys, as long as there is time."""
    result = record.result
    result |= {"ways": [], "blocks": [], "whole_runs": []}

    def attempt(kind: str, name: str, seconds: float, measure: Measure, in_words: InWords) -> None:
        found = record.attempt(name, seconds, measure, result[kind])
        if found is not None:
            say(in_words(found))

    for block in blocks:
        name = f"block, {block.model} {block.size}"
        attempt("blocks", name, _BLOCK_SECONDS, partial(_measure, record, block), line)
    for each in runs:
        name = f"run, {each.block.model} {each.block.size}"
        measure = partial(whole_runs.measure, record, each)
        attempt("whole_runs", name, _RUN_SECONDS, measure, whole_runs.line)
    for shape in shapes:
        measure = partial(weighing.measure, record, shape)
        attempt("ways", f"weighing, {shape.name}", _WAY_SECONDS, measure, weighing.line)
    return record.finish(goals(result))


def goals(result: Mapping[str, Any]) -> dict[str, Any]:
    """Times faster, and the time lost to a way that is not the fastest."""
    found: dict[str, Any] = {kind: len(result[kind]) for kind in ("ways", "blocks", "whole_runs")}
    lost = [row["lost"] for row in result["ways"] if row["lost"] is not None]
    if lost:
        found["lost"] = max(lost)
    for row in result["blocks"]:
        key = f"{row['name']}_{row['tokens']}_keys".lower().replace(" ", "_")
        found[key] = speed_up(row, KEYS)
    for row in result["whole_runs"]:
        key = f"run_of_{row['name']}_{row['size'].split(',')[0]}".lower().replace(" ", "_")
        found[key] = speed_up(row, "the defaults")
    return found


def methods() -> list[HostMethod]:
    """What merges in a block, beginning with the ideal."""

    def method(name: str, family: str, config: Mapping[str, Any], **more: Any) -> HostMethod:
        return HostMethod(name=name, family=family, config=ToMeConfig(**config), **more)

    # Weights are no part of the ideal.
    even = {"proportional_attn": False, **ALWAYS}
    keys = settings_of("balanced", {}) | {"forecast": False}
    ideal: dict[str, Any] = {"ideal": "ideal k,v"}
    return [
        method(
            "ideal k,v",
            "ideal",
            {"attn_tokens": "k,v"} | even,
            make_strategy=IdealStrategy,
            **ideal,
        ),
        method(KEYS, "ours", keys, **ideal),
        method("keys 0.75", "ours", keys | {"ratio": 0.75}),
    ]


def _measure(record: Record, block: Block) -> dict[str, Any]:
    """Check and time a block in each way."""
    model = block.published
    noise, prompt = inputs(model, block.latent)
    subject = Evaluations(
        build_class(model.kind, model.settings), noise, [prompt, prompt], 1.0, "simple"
    )
    expected, held, _ = first_look(subject, subject.model)
    rows: dict[str, dict[str, Any]] = {
        "unpatched": {"family": "unpatched", "error": 0.0, "peak_bytes": held}
    }
    patched: dict[str, ModelPatcher] = {"unpatched": subject.model}
    refused: dict[str, str] = {}
    with tried(record) as found:
        for method in methods():
            try:
                row = _checked(method, subject, expected)
            except Exception as error:
                refused[method.name] = f"{type(error).__name__}: {error}".splitlines()[0]
                name = f"block, {block.model} {block.size}, {method.name}"
                record.result["failed"][name] = refused[method.name]
            else:
                rows[method.name] = row
                patched[method.name] = method.patch(subject.model)
        runs = {name: partial(subject.time, each) for name, each in patched.items()}
        pace = record.pace(LEAST_ROUNDS, _BLOCK_SECONDS / 2)
        for name, seconds in interleaved(runs, ROUNDS, pace).items():
            rows[name]["seconds"] = seconds
    return {
        **{"name": block.model, "size": block.size, "tokens": block.tokens},
        "attention_share": model.attention_share(block.tokens),
        "dtype": "float32",
        "refused": refused,
        "methods": rows,
        "tried": found,
    }


def _checked(method: HostMethod, subject: Evaluations, expected: Tensor) -> dict[str, Any]:
    """Check the wiring of a method, and note what it merges, changes and takes of memory."""
    checks.check_wiring(method, subject, expected)
    output, held, merged = first_look(subject, method.patch(subject.model))
    return {
        "family": method.family,
        "ideal": method.ideal,
        "error": checks.difference(output, expected),
        "peak_bytes": held,
        "merged": merged,
    }


def line(row: Mapping[str, Any]) -> str:
    """A block in words: milliseconds unpatched, and times faster."""
    plain = statistics.median(row["methods"]["unpatched"]["seconds"])
    parts = [f"{name} {speed_up(row, name):.2f}" for name in row["methods"] if name != "unpatched"]
    return f"  {row['tokens']} tokens, {1000 * plain:.2f} ms; times faster: {'; '.join(parts)}"
