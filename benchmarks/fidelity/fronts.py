"""Error against time of everything that a user could pick, by judges whose picture is noise's.

python3 dev.py bench --fronts [--only pictures image few] [--steps 20 12 8 4]
    [--names "6 steps" ...] [--pictures 2]

It writes results/fronts.json after each step count, then the tables and one picture for each judge.
All other rows stay as they are.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

if TYPE_CHECKING:
    from benchmarks.fidelity.judges import SceneJudge
    from benchmarks.fidelity.options import Option
    from benchmarks.fidelity.pictures import Judge

RESULTS = ROOT / "benchmarks" / "results"
JUDGES: dict[str, tuple[str, float, tuple[int, ...]]] = {
    "pictures": ("The UNet of crops of photos", 2.0, (12,)),
    "image": ("A flow that takes many steps, with guidance", 3.0, (20, 8)),
    "few": ("The same distilled to four steps, without guidance", 1.0, (8, 4)),
}
"""The judges by name: a title, the scale of guidance, the step counts."""

Rows = dict[str, Mapping[str, Any]]
"""The figures of everything to pick, by name."""

MANY = 40
"""The steps of the run that stands for as many as one likes."""


def main() -> None:
    """Take the fronts that the command line asks for."""
    arguments = _arguments()
    use_cpu()

    from benchmarks.fidelity import calibration, fronts_page
    from benchmarks.machine import origin

    path = RESULTS / "fronts.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    taken = origin("cpu", "bench --fronts")
    taken["machine"] = taken["machine"]["description"]
    for name in arguments.only:
        _, guidance, counts = JUDGES[name]
        for steps in counts:
            if steps not in arguments.steps:
                continue
            print(f"{name}, {steps} steps", flush=True)
            if name == "pictures":
                rows = front_of_unet(steps, guidance, arguments.names)
            else:
                judge = judge_of(name, steps, guidance, arguments.pictures)
                rows = front(judge, arguments.names)
            kept = result.setdefault(name, {}).setdefault(str(steps), {})
            kept |= {each: {"origin": taken, **row} for each, row in rows.items()}
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name in result:
        fronts_page.plot(result[name], JUDGES[name][0], RESULTS / f"fronts-{name}.webp")
    summary = fronts_page.summary(result)
    titles = {name: title for name, (title, *_) in JUDGES.items()}
    text = fronts_page.markdown(result, titles, calibration.table(result), summary)
    (RESULTS / "fronts.md").write_text(text, encoding="utf-8")
    print(summary)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --fronts", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=JUDGES, default=[*JUDGES])
    parser.add_argument("--steps", nargs="+", type=int, default=[20, 12, 8, 4])
    parser.add_argument("--names", nargs="+", help="take only these rows again")
    parser.add_argument("--pictures", type=int, default=2)
    return parser.parse_args()


def judge_of(name: str, steps: int, guidance: float, pictures: int) -> "SceneJudge":
    """A judge, which has painted its pictures in so many steps."""
    from benchmarks.fidelity import scene_transformer, student
    from benchmarks.fidelity.judges import SceneJudge

    module = {"image": scene_transformer, "few": student}[name]
    weights = module.WEIGHTS
    if not weights.exists():
        raise SystemExit(f"{weights} is missing; train it with python -m {module.__name__}")
    return SceneJudge(steps, guidance=guidance, pictures=pictures, weights=weights)


def front(judge: "SceneJudge", names: Sequence[str] | None = None) -> Rows:
    """Figures of everything to pick, by name; ``time`` is the cost over that of the plain run."""
    from benchmarks.fidelity.options import options

    return _rows(judge, options(judge.steps), judge.tokens, names)


def front_of_unet(steps: int, guidance: float, names: Sequence[str] | None = None) -> Rows:
    """The same for the UNet; what merges is taken from the results of ``bench --fidelity``."""
    from benchmarks.fidelity.options import MERGING, OURS, without_merging
    from benchmarks.fidelity.pictures import PictureJudge

    judge = PictureJudge(steps, 1, guidance)
    rows = _rows(judge, without_merging(steps), None, names)
    results = json.loads((RESULTS / "fidelity.json").read_text(encoding="utf-8"))
    for name, row in results["pictures"][f"{steps} steps"].items():
        is_preset = name.startswith(("ours quality", "ours balanced", "ours fast"))
        if name not in rows:
            rows[name] = row | {"kind": OURS if is_preset else MERGING, "evaluations": steps}
    return rows


def _rows(
    judge: "Judge",
    picked: "Sequence[Option]",
    tokens: int | None,
    names: Sequence[str] | None,
) -> Rows:
    from benchmarks.fidelity.options import Meter, Option

    many = judge.pictures(judge.model, MANY)
    rows: Rows = {}
    whole = 0.0
    chosen = [option for option in picked if names is None or option.name in names]
    for option in [Option("plain", "plain"), *chosen]:
        patched = option.patch(judge.model)
        meter = Meter(tokens)
        with meter.watching(patched, option):
            pictures = judge.pictures(patched, option.steps, option.shrunk)
        whole = whole or meter.cost
        pictures = enlarged(pictures, option.shrunk)
        rows[option.name] = {
            "kind": option.kind,
            "time": meter.cost / whole,
            "evaluations": meter.evaluations,
            **judge.figures(pictures),
            "error against many": (pictures - many).square().mean().sqrt().item(),
        }
        row = rows[option.name]
        print(f"  {option.name}: {row['error']:.4f} at {row['time']:.2f}", flush=True)
    return rows


def enlarged(pictures: Any, times: int) -> Any:
    """Pictures scaled up, as a user would."""
    import torch.nn.functional as F

    if times == 1:
        return pictures
    return F.interpolate(pictures, scale_factor=times, mode="bicubic").clamp(0, 1)


if __name__ == "__main__":
    main()
