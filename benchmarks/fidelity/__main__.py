"""Error against time of everything that a user could pick, as trained models judge it.

python3 dev.py bench --fidelity [--quick] [--only pictures hires image few second video edit ...]
    [--steps 20 16 12 8 4] [--names NAME ...]

With ``--quick``, only what the last line needs is measured, once, with one number of steps and one
sampler, and nothing is kept. With the other arguments, the rows that they leave out stay as they
are in the results. The judges whose names begin with stickers_sd15 have to be trained first, see
``benchmarks/fidelity/training``, and are asked only by name.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

from benchmarks.fidelity import page, shares  # noqa: E402
from benchmarks.fidelity.judges import BENCHES  # noqa: E402
from benchmarks.fidelity.meter import Meter  # noqa: E402
from benchmarks.fidelity.options import Option  # noqa: E402
from benchmarks.fidelity.pictures import Judge  # noqa: E402
from benchmarks.machine import origin  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    """Ask the judges that the command line names."""
    arguments = _arguments()
    taken = origin("cpu", "bench --fidelity")
    taken["machine"] = taken["machine"]["description"]
    path = RESULTS / "fidelity.json"
    is_kept = not arguments.quick

    def with_others(result: dict[str, Any]) -> dict[str, Any]:
        """The results kept so far; another run may have added to them meanwhile."""
        is_there = is_kept and path.exists()
        return json.loads(path.read_text(encoding="utf-8")) if is_there else result

    result: dict[str, Any] = {}
    for name, steps, judge, picked in asked(arguments):
        print(f"{name}, {steps} steps", flush=True)
        rows, pictures = judged(judge, picked)
        result = with_others(result)
        kept = result.setdefault(name, {}).setdefault(str(steps), {})
        kept |= {option: {"origin": taken, **_rounded(row)} for option, row in rows.items()}
        if is_kept:
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            is_shown = name in page.SHOWN and not arguments.names
            if is_shown and str(steps) == next(iter(result[name])):
                page.sheet(pictures, RESULTS / page.sheet_name(name))
    result = with_others(result)
    summary = page.summary(result)
    if is_kept:
        for name in result:
            if shown := page.panels(result, name):
                page.plot(shown, RESULTS / page.plot_name(name))
        text = page.markdown(result, summary)
        (RESULTS / "fidelity.md").write_text(text, encoding="utf-8")
    print(summary)


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a row with as many digits as are worth keeping."""
    return {key: round(each, 5) if isinstance(each, float) else each for key, each in row.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --fidelity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="print the last line only, no files")
    trained = [name for name in page.JUDGES if name not in page.TRAINED_FIRST]
    parser.add_argument("--only", nargs="+", choices=page.JUDGES, default=trained)
    parser.add_argument("--steps", nargs="+", type=int, default=[20, 16, 12, 8, 4])
    parser.add_argument("--names", nargs="+", metavar="NAME", help="measure only these rows again")
    return parser.parse_args()


def asked(arguments: argparse.Namespace) -> Iterator[tuple[str, int, Judge, Sequence[Option]]]:
    """The judges that are asked: name, number of steps, judge, and options to try.

    Raises:
        SystemExit: for an unknown name, before any judge paints.
    """
    names = [name for name in arguments.only if name in page.SHOWN or not arguments.quick]
    benches = {name: BENCHES[name] for name in names}
    known = {
        option.name
        for bench in benches.values()
        for steps in bench.steps
        for option in bench.options(steps)
    }
    if unknown := set(arguments.names or ()) - known:
        raise SystemExit(f"--names has {sorted(unknown)}; there are {', '.join(sorted(known))}")
    for name, bench in benches.items():
        for steps in bench.steps[:1] if arguments.quick else bench.steps:
            picked = [
                option
                for option in bench.options(steps)
                if option.name in (arguments.names or [option.name])
                and (not arguments.quick or _is_quick(option))
            ]
            if picked and (arguments.quick or steps in arguments.steps):
                yield name, steps, bench.make(steps), picked


def _is_quick(option: Option) -> bool:
    return option.kind == shares.STEPS or option.name in page.QUICK


def judged(judge: Judge, picked: Sequence[Option]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and pictures of every option, by name, with the plain model first.

    The time is the work of all evaluations, relative to the plain run.
    """
    pictures: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    plain = 0.0
    for option in (Option(page.PLAIN, page.PLAIN), *picked):
        model = option.patch(judge.model)
        meter = Meter(judge.tokens, judge.attention)
        with meter.watching(model, option.keys):
            painted = judge.pictures(model, option.steps)
        if option.name == page.PLAIN:
            plain, judge.expected = meter.cost, painted
        pictures[option.name] = painted
        row = rows[option.name] = {
            "kind": option.kind,
            "time": meter.cost / plain,
            "evaluations": meter.evaluations,
            **judge.figures(painted),
        }
        print(f"  {option.name}: {row['error']:.4f} at {row['time']:.2f}", flush=True)
    return rows, pictures


if __name__ == "__main__":
    main()
