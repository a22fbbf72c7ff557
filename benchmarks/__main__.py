"""Compare the methods on real UNet shapes: tables, JSON and plots.

Every method is checked before it is timed. Results are written to benchmarks/results/ after each
model and size, so an interrupted run loses only the current one.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.environment import comfyui_directory  # noqa: E402

sys.path.insert(0, str(comfyui_directory()))

# Without a GPU, the profiler would log its absence as an error.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

from comfy.cli_args import args as host_arguments  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("sd15", "sdxl")
SIZES = [512, 768, 1024, 1536, 2048]
QUICK_SIZES = {"sd15": [256], "sdxl": [320]}
RATIOS = (0.5, 0.75)


def main() -> int:
    """Run the benchmark that the command line asks for."""
    # The plot is still drawn from the results so far.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = _arguments()
    host_arguments.cpu = arguments.device == "cpu"
    host_arguments.use_pytorch_cross_attention = True
    bench = Bench(arguments)
    if arguments.forecast:
        bench.foretell()
        return 0
    try:
        bench.run()
    finally:
        bench.write(with_plot=True)
    return bench.finish()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, about a minute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument(
        "--size", nargs="+", type=int, help="sides of the pictures, in pixels: multiples of 64"
    )
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1], help="pictures at once; CFG doubles them"
    )
    parser.add_argument(
        "--ratio", type=float, choices=RATIOS, default=0.5, help="the ratios that an ideal can have"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        help="headline (what the summary needs), all, or names from the tables, which include "
        "the ideals they are compared with; default: all, with --quick headline",
    )
    parser.add_argument(
        "--forecast", action="store_true", help="only count the FLOPs, and write forecast.md"
    )
    parser.add_argument("--repeats", type=int, help="timed rounds; default: 3, on a GPU 10")
    parser.add_argument(
        "--minutes",
        type=float,
        help="leave out what does not fit into this time; default: 15, no limit on a GPU",
    )
    parser.add_argument(
        "--name", help="name of the result files, for example quick-cpu or full-cuda"
    )
    arguments = parser.parse_args()
    for size in arguments.size or ():
        if size < 64 or size % 64:
            parser.error(f"--size {size} is not allowed: it must be a multiple of 64")
    for name in ("batch", "repeats"):
        if min(_listed(getattr(arguments, name)), default=1) < 1:
            parser.error(f"--{name} is not allowed to be below 1")
    arguments.methods = arguments.methods or ["headline" if arguments.quick else "all"]
    on_gpu = arguments.device == "cuda"
    arguments.name = arguments.name or ("quick-" if arguments.quick else "full-") + arguments.device
    arguments.repeats = arguments.repeats or (10 if on_gpu else 3)
    if arguments.minutes is None and not (on_gpu or arguments.quick):
        arguments.minutes = 15.0
    return arguments


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def chosen_methods(every: list[Any], names: list[str]) -> list[Any]:
    """The methods that ``--methods`` names and the ideals they need, in the order of ``every``.

    Raises:
        SystemExit: a name is unknown.
    """
    if names == ["all"]:
        return every
    if names == ["headline"]:
        return [each for each in every if each.headline]
    known = {each.name: each for each in every}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(
            f"--methods: there is no {', '.join(unknown)}; it must be all, headline, or some of "
            + ", ".join(known)
        )
    wanted = {*names, *(known[name].ideal for name in names)}
    return [each for each in every if each.name in wanted]


class Bench:
    """One run of the benchmark.

    Attributes:
        result: the content of the results file.
        all_right: whether every method has passed its checks so far.
    """

    def __init__(self, arguments: argparse.Namespace):
        import torch

        from benchmarks.machine import origin

        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.start = time.monotonic()
        self.all_right = True
        # A small picture is enough for a check; on a GPU it should be like the timed ones.
        self.check_size = 512 if arguments.device == "cuda" else 64 if arguments.quick else 128
        self.result: dict[str, Any] = {
            "name": arguments.name,
            **origin(arguments.device),
            "ratio": arguments.ratio,
            "matching_seconds": {},
            "slopes": {},
            "runs": [],
            "left_out": [],
        }

    def run(self) -> None:
        """Measure everything that the command line asks for."""
        from benchmarks.figures import slope_table
        from benchmarks.slope import log_log_slope, matching_seconds

        say(f"{self.result['machine']['description']}. Matching alone, 1,024 to 65,536 tokens:")
        times = matching_seconds(self.device)
        self.result["slopes"] = {name: log_log_slope(points) for name, points in times.items()}
        self.result["matching_seconds"] = {
            name: {str(tokens): value for tokens, value in points.items()}
            for name, points in times.items()
        }
        say(slope_table(self.result))
        for index, model in enumerate(self.arguments.model):
            available = None
            if self.arguments.minutes is not None:
                left = 60 * self.arguments.minutes - (time.monotonic() - self.start)
                available = left / (len(self.arguments.model) - index)
            self.measure(model, available)

    def measure(self, name: str, available: float | None) -> None:
        """Check all methods on one model, and time them at all sizes for which there is time."""
        from benchmarks.forecast import affordable, total_seconds
        from benchmarks.measure import Stopwatch

        began = time.monotonic()
        arguments = self.arguments
        say(f"\n{name}: loading and checking")
        shape, model, every, foretold, subject_of = self.prepare(name)
        subject = subject_of(self.check_size)
        right, refused, launches = self.check(subject, every)
        counts = {"all": len(right)}
        if arguments.methods == ["all"]:
            counts["headline"] = sum(each.headline for each in right)
        watch = Stopwatch(self.device)
        # On a smaller map, reading the weights would take most of the time.
        smallest = self.sizes(name)[0]
        subject = subject_of(smallest)
        subject.run(subject.model, watch)
        seconds_per_flop = watch.seconds / foretold.unpatched(smallest)
        for batch in arguments.batch:
            for size in self.sizes(name):
                subject = subject_of(size, batch)
                expected = seconds_per_flop * foretold.unpatched(size) * batch
                left = None if available is None else available - (time.monotonic() - began)
                choice = affordable(expected, counts, arguments.repeats, left)
                title = f"{name} {size}x{size}, batch {2 * batch}"
                if choice is None:
                    least = minutes(total_seconds(expected, min(counts.values()), 1))
                    self.leave_out(f"{title} takes {least} at least; --minutes gives it time")
                    continue
                selection, repeats = choice
                chosen = [each for each in right if selection == "all" or each.headline]
                if len(chosen) < len(right):
                    names = ", ".join(each.name for each in right if each not in chosen)
                    self.leave_out(f"{title} without {names}; --minutes gives them time")
                say(
                    f"\n{title}: {len(chosen)} methods, {repeats} rounds, about "
                    + minutes(total_seconds(expected, len(chosen), repeats))
                )
                try:
                    run = self.compare(subject, chosen, repeats)
                except RuntimeError as error:
                    self.leave_out(f"{title}: {error}")
                    continue
                run |= {
                    "model": name,
                    "note": shape.note,
                    "size": size,
                    "batch": 2 * batch,
                    "dtype": str(model.model.get_dtype_inference()).removeprefix("torch."),
                    "forecast": foretold.speed_ups(size),
                }
                run["refused"] = refused | run["refused"]
                for each, count in launches.items():
                    if each in run["methods"]:
                        run["methods"][each]["launches_per_block"] = count
                self.keep(run)
                plain = run["methods"]["unpatched"]["seconds"]
                seconds_per_flop = min(plain) / (foretold.unpatched(size) * batch)

    def sizes(self, name: str) -> list[int]:
        """The sides of the pictures to measure a model at, the smallest first."""
        return sorted(self.arguments.size or (QUICK_SIZES[name] if self.arguments.quick else SIZES))

    def prepare(self, name: str) -> tuple[Any, ...]:
        """Shape, model, methods, their forecast, and a function that makes inputs of any size."""
        from benchmarks.forecast import forecast
        from benchmarks.measure import Subject
        from benchmarks.methods import backend_variants, methods
        from benchmarks.models import REDUCED, SHAPES, load

        shape = (REDUCED if self.arguments.quick else SHAPES)[name]
        model = load(shape, self.device)

        def subject_of(size: int, batch: int = 1) -> Subject:
            return Subject(model, shape.context_channels, size, batch)

        variants = backend_variants(self.device)
        every = methods(self.arguments.ratio, shape.max_downsample, variants)
        every = chosen_methods(every, self.arguments.methods)
        foretold = forecast(subject_of, [each for each in every if each.family == "ideal"])
        return shape, model, every, foretold, subject_of

    def foretell(self) -> None:
        """Print and write the speed-ups that FLOPs allow, without timing anything."""
        from benchmarks.figures import forecast_table

        forecasts = {}
        for name in self.arguments.model:
            foretold = self.prepare(name)[3]
            forecasts[name] = {size: foretold.speed_ups(size) for size in self.sizes(name)}
        text = forecast_table(forecasts)
        say(text)
        RESULTS.mkdir(parents=True, exist_ok=True)
        head = f"# Forecast: `{self.result['command']}`\n\nRatio {self.arguments.ratio}.\n\n"
        (RESULTS / "forecast.md").write_text(head + text + "\n", encoding="utf-8")

    def check(
        self, subject: Any, every: list[Any]
    ) -> tuple[list[Any], dict[str, str], dict[str, Any]]:
        """The correct methods, why the others are wrong, and the launches of the correct ones."""
        from benchmarks import checks
        from benchmarks.methods import HostMethod

        dtype = subject.model.model.get_dtype_inference()
        expected = checks.unpatched_output(subject)
        unpatched = checks.launches_unpatched(subject)
        right, refused, launches = [], {}, {}
        for method in every:
            try:
                checks.check_wiring(method, subject, expected)
                if isinstance(method, HostMethod):
                    checks.check_plan(method, self.device, dtype)
                    launches[method.name] = checks.launches_per_block(method, subject, unpatched)
                right.append(method)
            # One failing method must not stop the others.
            except Exception as error:
                refused[method.name] = self.refuse(method.name, error)
        return right, refused, launches

    def compare(self, subject: Any, chosen: list[Any], repeats: int) -> dict[str, Any]:
        """Run each method once, then time all of them in turn."""
        from benchmarks import checks
        from benchmarks.measure import PeakMemory, merged_blocks
        from benchmarks.methods import HostMethod
        from benchmarks.rounds import interleaved

        memory = PeakMemory(self.device)
        (expected,) = subject.run(subject.model, memory)
        rows: dict[str, dict[str, Any]] = {
            "unpatched": {"family": "unpatched", "error": 0.0, "peak_bytes": memory.bytes}
        }
        patched, refused = {"unpatched": subject.model}, {}
        for index, method in enumerate(chosen):
            began = time.monotonic()
            try:
                model, memory = method.patch(subject.model), PeakMemory(self.device)
                with merged_blocks() as blocks:
                    (output,) = subject.run(model, memory)
                error = checks.difference(output, expected)
                ideal = rows.get(method.ideal, {}).get("error")
                checks.check_distance(error, None if method.family == "ideal" else ideal)
            except Exception as error:
                refused[method.name] = self.refuse(method.name, error)
                continue
            patched[method.name] = model
            rows[method.name] = {
                "family": method.family,
                "ideal": method.ideal,
                "error": error,
                "peak_bytes": memory.bytes,
            }
            if isinstance(method, HostMethod):
                merged = "{}/{}".format(*blocks[0]) if blocks else "none"
                rows[method.name]["merged"] = merged
            say(f"  {index + 1}/{len(chosen)} {method.name}: {time.monotonic() - began:.1f} s")
        began = time.monotonic()

        def after_round(done: int) -> None:
            left = (time.monotonic() - began) / done * (repeats - done)
            say(f"  round {done} of {repeats}" + (f", {minutes(left)} left" if left else ""))

        runs = {name: (lambda model=model: subject.time(model)) for name, model in patched.items()}
        for name, seconds in interleaved(runs, repeats, after_round).items():
            rows[name]["seconds"] = seconds
        for method in chosen:
            if method.family == "ours" and method.name in rows and isinstance(method, HostMethod):
                rows[method.name]["stages"] = subject.stages(method.recorded(subject.model))
        return {"repeats": repeats, "methods": rows, "refused": refused}

    def keep(self, run: dict[str, Any]) -> None:
        """Print and write the result of one comparison."""
        from benchmarks import figures

        self.result["runs"].append(run)
        self.write()
        say("\n" + figures.table(run))
        if split := figures.stage_table(run):
            say("\n" + split)

    def refuse(self, name: str, error: Exception) -> str:
        """Report that a method is not timed, and return the reason."""
        self.all_right = False
        why = str(error) if type(error).__name__ == "WrongOutput" else f"{error!r}"
        say(f"  ERROR: {name} is not timed: {why}")
        return why

    def leave_out(self, why: str) -> None:
        """Report and record what is not measured."""
        say(f"  left out: {why}")
        self.result["left_out"].append(why)

    def write(self, with_plot: bool = False) -> None:
        """Write the results so far."""
        from benchmarks import figures, plots

        if not self.result["runs"]:
            return
        RESULTS.mkdir(parents=True, exist_ok=True)
        files = {suffix: RESULTS / f"{self.arguments.name}.{suffix}" for suffix in EXTENSIONS}
        files["json"].write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")
        files["md"].write_text(figures.markdown(self.result, files["webp"].name), encoding="utf-8")
        if with_plot:
            plots.draw(self.result, files["webp"])

    def finish(self) -> int:
        """Print the summary; the exit code is 1 if any method was wrong."""
        from benchmarks.figures import summary

        took = minutes(time.monotonic() - self.start)
        say(f"\n{took}; results: benchmarks/results/{self.arguments.name}.{{json,md,webp}}")
        say(summary(self.result))
        return int(not self.all_right)


EXTENSIONS = ("json", "md", "webp")


def say(text: str) -> None:
    """Print without buffering, so that a log shows the progress."""
    print(text, flush=True)


def minutes(seconds: float) -> str:
    """A rough duration in words."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main())
