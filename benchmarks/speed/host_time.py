"""The time and the launches that merging adds on the host, for which a GPU may have to wait.

python3 dev.py bench --host-time [--quick]

The same is measured of a shallow evaluation, beside whole ones.

It is measured without a GPU. The UNets have as many modules as SD 1.5 and SDXL, but so few channels
and tokens that an evaluation is all Python and calls of operators. The launchers of the Triton
kernels run up to the launch, which is left out because there is no GPU; it takes 3 to 5 µs more.
Each evaluation runs between two of the unpatched model with the same inputs. The time is the median
of its differences from both, since other programs make single evaluations much slower.
"""

import argparse
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import torch  # noqa: E402
import triton  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from comfy.patcher_extension import WrapperExecutor  # noqa: E402
from models.checkpoints import unet_of  # noqa: E402
from models.comfyui import build_class  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.rounds import interleaved  # noqa: E402
from benchmarks.speed.absent_gpus import absent_gpus  # noqa: E402
from benchmarks.speed.figures import grid, spread  # noqa: E402
from benchmarks.speed.measure import Operators, Subject, merged_blocks  # noqa: E402
from benchmarks.speed.record import Record, say  # noqa: E402
from tome_nodes.comfyui.attachment import attach, last_run  # noqa: E402
from tome_nodes.comfyui.neighbours import KEY  # noqa: E402
from tome_nodes.merging import engine  # noqa: E402
from tome_nodes.merging.key_weights import Capabilities  # noqa: E402
from tome_nodes.ops import triton as kernels  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import PRESETS, settings_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

STEPS = 8
"""Evaluations of a run."""

ROUNDS = 9
"""Timed runs of a method."""

_CONTEXT = 32


MODELS = {"sd15": ("SD15", "sd15"), "sdxl": ("SDXL", "sdxl_base")}
"""The UNets: the class in ``comfy.supported_models``, and the checkpoints with its settings."""

PIXELS = 64
"""Height and width of a picture."""

_BALANCED, _FAST = (
    {
        **settings_of(name, {}),
        "forecast": False,
        "min_tokens": 1,
        "policy": replace(PRESETS[name].policy, least_saved=0.0),
    }
    for name in ("balanced", "fast")
)

METHODS: Mapping[str, Mapping[str, Any]] = {
    "nothing merges": {**_BALANCED, "min_tokens": 10**6},
    "balanced": _BALANCED,
    "fast": _FAST,
    "balanced on torch": {**_BALANCED, "backend": "torch"},
}
"""The settings to measure, with the Triton kernels unless they say otherwise. No step is skipped,
and maps of all sizes merge."""

SHALLOW: Mapping[str, Any] = {"ratio": 0.6, "forecast": True, "merge_attn": False}
"""Settings under which steps are shallow and nothing merges."""


class _Compared(Subject):
    """Evaluates the unpatched model before and after the patched one.

    Attributes:
        plain: two for each step, the seconds of the unpatched evaluations.
        added: two for each step, the seconds of the patched evaluation minus the seconds of each
            unpatched one. Only this thread is timed.
    """

    def compare(self, patched: ModelPatcher) -> None:
        self.plain: list[float] = []
        self.added: list[float] = []
        self.run(patched, *[nullcontext()] * STEPS)

    def _evaluation(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        *inputs, options = args
        plain = {name: value for name, value in options.items() if name != KEY}
        seconds: list[float] = []
        result: Any = None
        for given in plain, options, plain:
            start = time.thread_time() - _Unlaunched.seconds
            output = executor(*inputs, dict(given), **kwargs)
            seconds.append(time.thread_time() - _Unlaunched.seconds - start)
            result = output if given is options else result
        before, own, after = seconds
        self.plain += before, after
        self.added += own - before, own - after
        self._outputs.append(result)
        return result


class _Unlaunched:
    """Stands in for a kernel: runs up to the launch, which is only counted.

    Attributes:
        count: the launches so far.
        seconds: time that this thread spent on what a kernel would have done.
    """

    seconds = 0.0

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> _Compiled:
            self._kernel.run(*arguments, grid=grid, warmup=True, **options)
            self.ran(arguments)
            return _Compiled(self)

        return launch

    def ran(self, arguments: tuple[Any, ...]) -> None:
        """Count a launch, and prepare its results so that the rest of the evaluation can run."""
        start = time.thread_time()
        self.count += 1
        # Leftover numbers in memory may be slow to compute with.
        for name, value in zip(self._kernel.arg_names, arguments, strict=True):
            if name in _WRITTEN:
                ctypes.memset(value.data_ptr(), 0, value.nbytes)
        _Unlaunched.seconds += time.thread_time() - start


class _Compiled:
    """Stands in for a kernel that Triton has compiled."""

    def __init__(self, of: _Unlaunched):
        self._of = of

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any) -> None:
            # As Triton does.
            active = triton.runtime.driver.active
            active.get_current_stream(active.get_current_device())
            self._of.ran(arguments)

        return launch


_WRITTEN = frozenset({"means", "keys", "wide_q", "wide_k", "wide_v"})
"""Arguments that kernels write and the model computes with."""


@contextmanager
def unlaunched() -> Iterator[list[_Unlaunched]]:
    """Make the launchers run on a CPU without their kernels; yields the stand-ins."""

    def resolve(backend: str, device: Any, dtype: Any) -> tuple[str, None]:
        return ("torch" if backend == "torch" else "triton"), None

    with ExitStack() as stack:
        _, stand_ins = stack.enter_context(absent_gpus(_Unlaunched))
        match = kernels.TRITON.match_windows
        assert match is not None
        zeros: dict[tuple[torch.Size, ...], tuple[Tensor, ...]] = {}

        def valid(*arguments: Any) -> tuple[Tensor, ...]:
            # No kernel has written these, so they would not be valid indices.
            made = match(*arguments)
            start = time.thread_time()
            shapes = tuple(array.shape for array in made)
            if shapes not in zeros:
                zeros[shapes] = tuple(map(torch.zeros_like, made))
            _Unlaunched.seconds += time.thread_time() - start
            return zeros[shapes]

        capable = Capabilities(flash=True, cudnn=True)
        for module, name, value in (
            (engine, "resolve", resolve),
            (engine, "capabilities", lambda *_: capable),
            (kernels, "TRITON", replace(kernels.TRITON, match_windows=valid)),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield stand_ins


class _Calls:
    """A context that counts the functions of Python and of C that are called in it."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._seen)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


Figures = Mapping[str, Any]
"""What a method adds to an evaluation.

``unpatched``: milliseconds of an evaluation of the unpatched model; ``added``: milliseconds that
merging adds, median over the rounds, and their ``quartiles``; ``launches``: launches that it adds
to an evaluation, on average over a run; ``calls``: functions that it calls in the third
evaluation; ``blocks``: the blocks that merge.
"""


def _subjects(kind: str, family: str) -> tuple[Subject, _Compared]:
    """A UNet with all its modules, and few channels: to count in, and to time in."""
    thin = unet_of(family) | {"model_channels": 32, "context_dim": _CONTEXT}
    loaded = build_class(kind, thin)
    return Subject(loaded, _CONTEXT, PIXELS), _Compared(loaded, _CONTEXT, PIXELS)


def measure(subject: Subject, compared: _Compared, rounds: int) -> dict[str, Figures]:
    """The figures of all methods on a UNet, see :func:`_subjects`."""
    configs = {name: ToMeConfig(**settings) for name, settings in METHODS.items()}
    patched = {"unpatched": subject.model}
    patched |= {name: attach(subject.model, config) for name, config in configs.items()}
    with unlaunched() as stand_ins:
        launches, called, merged = {}, {}, {}
        for name, method in patched.items():
            subject.run(method, *[nullcontext()] * STEPS)
            calls = [Operators() for _ in range(STEPS)]
            for stand_in in stand_ins:
                stand_in.count = 0
            subject.run(method, *calls)
            own = sum(stand_in.count for stand_in in stand_ins)
            launches[name] = (own + sum(call.count for call in calls)) / STEPS
            merged[name], _ = merged_blocks(method)
            # The evaluations before prepare what later ones use.
            counted = _Calls()
            subject.run(method, nullcontext(), nullcontext(), counted)
            called[name] = counted.count
        plain: list[float] = []

        def added(name: str) -> float:
            # Twice, since Python adapts its code to what runs, and other settings ran before.
            for _ in range(2):
                # Otherwise garbage of one run would be collected in the next.
                gc.collect()
                compared.compare(attach(compared.model, configs[name]))
            plain.extend(compared.plain)
            # The first evaluation also prepares the run.
            return statistics.median(compared.added[2:])

        gc.disable()
        try:
            taken = interleaved({name: partial(added, name) for name in METHODS}, rounds)
        finally:
            gc.enable()
    figures: dict[str, Figures] = {}
    for name in METHODS:
        low, median, high = spread([1000 * seconds for seconds in taken[name]])
        figures[name] = {
            "unpatched": 1000 * statistics.median(plain),
            "added": median,
            "quartiles": (low, high),
            "launches": launches[name] - launches["unpatched"],
            "calls": called[name] - called["unpatched"],
            "blocks": merged[name],
        }
    return figures


def measure_shallow(subject: Subject, compared: _Compared, rounds: int) -> dict[str, float]:
    """The launches and the milliseconds of a whole and of a shallow evaluation of such a UNet."""
    config = ToMeConfig(**SHALLOW)
    patched = attach(subject.model, config)
    calls = [Operators() for _ in range(STEPS)]
    subject.run(patched, *calls)
    run = last_run(patched)
    shallow = sorted(run.counts.shallow_steps) if run else []
    whole = [step for step in range(2, STEPS) if step not in shallow]
    taken: dict[str, list[float]] = {"whole": [], "shallow": []}
    # Python adapts its code to what runs.
    compared.compare(attach(compared.model, config))
    for _ in range(rounds):
        compared.compare(attach(compared.model, config))
        for name, steps in (("whole", whole), ("shallow", shallow)):
            taken[name] += [compared.plain[2 * step] + compared.added[2 * step] for step in steps]
    return {
        **{f"{name}_ms": 1000 * statistics.median(each) for name, each in taken.items()},
        "whole_launches": statistics.median(calls[step].count for step in whole),
        "shallow_launches": statistics.median(calls[step].count for step in shallow),
    }


def goals(results: Mapping[str, Mapping[str, Figures]]) -> dict[str, float]:
    """Milliseconds by model, and the most launches and calls for a block that merges."""
    reached = {
        f"host_ms_{model}": methods["balanced"]["added"] for model, methods in results.items()
    }
    if "sdxl" in results:
        reached["host_ms_sdxl_fast"] = results["sdxl"]["fast"]["added"]
    reached["host_ms_idle"] = max(each["nothing merges"]["added"] for each in results.values())
    for goal, figure, method in (
        ("launches", "launches", "balanced"),
        ("calls_balanced", "calls", "balanced"),
        ("calls_fast", "calls", "fast"),
    ):
        ways = [methods[method] for methods in results.values()]
        reached[goal] = max(way[figure] / way["blocks"] for way in ways)
    return reached


def table(results: Mapping[str, Mapping[str, Figures]]) -> str:
    """The figures as Markdown."""
    head = ["model", "method", "unpatched, ms", "added, ms", "quartiles"]
    head += ["blocks", "launches", "calls"]
    rows = [
        [
            model,
            name,
            f"{figures['unpatched']:.1f}",
            f"{figures['added']:.2f}",
            "{:.2f} to {:.2f}".format(*figures["quartiles"]),
            str(figures["blocks"]),
            f"{figures['launches']:.1f}",
            str(figures["calls"]),
        ]
        for model, methods in results.items()
        for name, figures in methods.items()
    ]
    return grid(head, rows)


def shallow_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """The figures of shallow evaluations as Markdown."""
    head = ["model", "launches, whole", "shallow", "share", "ms, whole", "shallow", "share"]
    rows = []
    for model, figures in results.items():
        row = [model]
        for what, form in ("launches", "{:.0f}"), ("ms", "{:.1f}"):
            whole, shallow = figures[f"whole_{what}"], figures[f"shallow_{what}"]
            row += [form.format(whole), form.format(shallow), f"{shallow / whole:.3f}"]
        rows.append(row)
    return grid(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py bench --host-time", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="only SD 1.5 in one round, keep nothing"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    record = Record("host-time", "bench --host-time", None if arguments.quick else RESULTS)
    result = record.result
    models = result["models"] = {}
    shallow = result["shallow"] = {}
    rounds = 1 if arguments.quick else ROUNDS
    with torch.no_grad():
        for name in ["sd15"] if arguments.quick else MODELS:
            subjects = _subjects(*MODELS[name])
            models[name] = measure(*subjects, rounds)
            shallow[name] = measure_shallow(*subjects, rounds)
    page, other = table(models), shallow_table(shallow)
    say(f"{page}\n\n{other}")
    shares = (each["shallow_launches"] / each["whole_launches"] for each in shallow.values())
    code = record.finish(goals(models) | {"shallow_share": max(shares)})
    record.write_page(
        [
            f"# Host time: `{result['command']}`",
            f"{result['machine']['description']}, {result['date']}. The median time that merging "
            "adds to an evaluation before any kernel runs, the launches that it adds, on average "
            "over a run of 8 steps, and the functions that it calls.",
            f"`{result['summary']}`",
            page,
            "A shallow evaluation and a whole one beside it, where nothing merges: their launches, "
            "and the time that they take on this CPU, where a UNet with so few channels is all "
            "Python and calls of operators.",
            other,
        ]
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
