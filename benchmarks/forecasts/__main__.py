"""Does a forecast ever change the result more than as many fewer steps? In which situation?

python3 dev.py bench --forecasts [--quick] [--only WORDS ...]

A graph has a sampler, a number of steps, a guidance scale, a negative prompt or none, a situation
and a schedule. On the exact denoiser, each pair of values of these occurs, and each other sampler
once. Some graphs run on a small trained transformer, too.
With ``--quick``, pairs among samplers, situations and schedules need not occur, the transformer
runs only in 8 steps, and nothing is kept. With ``--only``, only graphs run whose words contain one
of these, and nothing is kept. The exit code is 1 if a cell is over the limit.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import comfy.samplers  # noqa: E402
import comfyui_version  # noqa: E402
import torch  # noqa: E402

from benchmarks.forecasts import page  # noqa: E402
from benchmarks.forecasts.cells import SAMPLERS, Cell, Graph, cell  # noqa: E402
from benchmarks.forecasts.pairs import cover  # noqa: E402
from benchmarks.forecasts.situations import SITUATIONS  # noqa: E402
from benchmarks.forecasts.subjects import TRAINED_FLOW  # noqa: E402
from benchmarks.machine import origin  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

SHIFTS = (1.0, 3.0, 12.0)
PAIRED = (
    *("euler", "euler_ancestral", "ddim", "ddpm", "er_sde", "sa_solver", "uni_pc"),
    *("dpmpp_2m", "res_multistep", "heun", "deis", "dpmpp_2m_sde", "euler_cfg_pp"),
)
"""The samplers under which steps are forecast, and one for each reason why none are."""

AXES: dict[str, Sequence[Any]] = {
    "sampler": PAIRED,
    "steps": (8, 10, 20, 30),
    "guidance": (1.0, 3.0, 7.0),
    "negative": (True, False),
    "situation": tuple(SITUATIONS),
    "schedule": tuple(
        (scheduler, shift) for scheduler in comfy.samplers.SCHEDULER_NAMES for shift in SHIFTS
    ),
}
LONG_AXES = ("sampler", "situation", "schedule")


def graphs(is_quick: bool) -> list[Graph]:
    """The graphs of the table on the exact denoiser."""
    apart = LONG_AXES if is_quick else ()
    others = [sampler for sampler in SAMPLERS if sampler not in PAIRED]
    return [
        *(_graph(**row) for row in cover(AXES, apart)),
        *(Graph(sampler, 8, 3.0, True, "plain", "simple", 3.0) for sampler in others),
    ]


def _graph(schedule: tuple[str, float | None], **others: Any) -> Graph:
    scheduler, shift = schedule
    return Graph(scheduler=scheduler, shift=shift, **others)


def trained_graphs(is_quick: bool) -> list[Graph]:
    """Graphs on the trained model: where forecasts did harm once, and plain graphs to compare."""
    asked: list[tuple[int, float, str, str]] = [
        *((steps, scale, "plain", "euler") for steps in (8, 10, 20) for scale in (3.0, 5.0, 7.0)),
        *((steps, 6.0, "prompts in two calls", "euler") for steps in (8, 10)),
        *((steps, 7.0, "CFGZeroStar", "euler") for steps in (8, 20)),
        *((steps, 3.0, "CFGOverride 0.2 to 0.8 before ours", "euler") for steps in (8, 20)),
        *((steps, 3.0, "second prompt 0.2 to 0.8", "euler") for steps in (8, 20)),
        *((steps, 3.0, "lying sigma", "euler") for steps in (8, 20)),
        *((steps, 3.0, "ControlNet 0 to 0.5", "euler") for steps in (8, 20)),
        *((20, 3.0, "plain", sampler) for sampler in ("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_sde")),
        *((8, 3.0, "plain", sampler) for sampler in ("res_multistep", "euler_cfg_pp", "heun")),
    ]
    # Two noise levels near the highest are so close that a line through their answers leads far.
    close = (("simple", 30), ("beta", 17), ("beta", 18))
    trained = [
        *(
            Graph(sampler, steps, scale, False, situation, "simple", None, on=TRAINED_FLOW)
            for steps, scale, situation, sampler in asked
        ),
        *(
            Graph("euler", steps, 3.0, False, "plain", scheduler, 11.0, on=TRAINED_FLOW)
            for scheduler, steps in close
        ),
    ]
    return [graph for graph in trained if graph.steps == 8 or not is_quick]


def main() -> int:
    """Run all cells and write the table; 1 if one of them is over the limit."""
    parser = argparse.ArgumentParser(prog="dev.py bench --forecasts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cells, no files")
    parser.add_argument("--only", nargs="+", metavar="WORDS", default=[""])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The host's samplers warn.
    warnings.simplefilter("ignore", UserWarning)
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("tome_nodes").propagate = False
    asked = [*graphs(arguments.quick), *trained_graphs(arguments.quick)]
    rows: list[tuple[Graph, Cell]] = []
    for graph in asked:
        if any(words in graph.in_words() for words in arguments.only):
            rows.append((graph, cell(graph)))
            _show(len(rows), *rows[-1])
    summary = page.summary(rows)
    if not arguments.quick and arguments.only == [""]:
        taken = {**origin("cpu", "bench --forecasts"), "host": comfyui_version.__version__}
        text = page.markdown(taken, summary, rows)
        (RESULTS / "forecasts.md").write_text(text, encoding="utf-8")
    print(summary)
    return int(any(result.ratio > 1 for _, result in rows))


def _show(number: int, graph: Graph, result: Cell) -> None:
    """Show a cell that is over the limit, and how far the table is."""
    if result.ratio > 1:
        print(f"{result.ratio:.2f}: {graph.in_words()}: {result.in_words()}", flush=True)
    if number % 100 == 0:
        print(f"{number} cells", flush=True)


if __name__ == "__main__":
    sys.exit(main())
