"""Error against time saved, by trained models: pictures of a UNet, pictures and videos of
transformers.

python3 dev.py bench --fidelity [--quick] [--only pictures image video]
    [--methods NAME ...] [--repeats 3] [--seeds 1]

With ``--quick``, the methods of the last line are taken once and nothing is kept. With
``--only`` and ``--methods``, the other rows of the results stay as they are.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from benchmarks.fidelity.page import (
    BALANCED75,
    DEFAULT,
    FAST,
    FAST_DEFAULT,
    IN_SUMMARY,
    JUDGES,
    KV75,
    PAPER,
    PLAIN,
    POOLED,
    TODO,
    TOMESD,
)
from benchmarks.host import use_cpu
from tools.environment import ROOT

if TYPE_CHECKING:
    from benchmarks.fidelity.pictures import Judge

RESULTS = ROOT / "benchmarks" / "results"
IN_SHORT = (TOMESD, PAPER, POOLED, DEFAULT, BALANCED75, FAST, FAST_DEFAULT)
"""The methods by which samplings are compared, as far as a judge has them."""


@dataclass(frozen=True)
class Sampling:
    """How a model is sampled from.

    Attributes:
        judge: the part of the results that it belongs to.
        name: its name there.
        steps: the number of steps.
        guidance: the scale of guidance; 1 evaluates the model without.
        scheduler: the host's name of the spacing of the steps; None for that of the judge.
        methods: the names of those to judge, None for all.
        is_quick: whether ``--quick`` takes it too.
    """

    judge: str
    name: str
    steps: int
    guidance: float = 2.0
    scheduler: str | None = None
    methods: Sequence[str] | None = None
    is_quick: bool = False


SAMPLINGS = (
    Sampling("pictures", "12 steps", 12, is_quick=True),
    Sampling("pictures", "12 even steps", 12, scheduler="sgm_uniform", methods=IN_SHORT),
    Sampling("pictures", "8 steps, no guidance", 8, 1.0, methods=IN_SHORT),
    Sampling("pictures", "4 steps, no guidance", 4, 1.0, methods=IN_SHORT),
    Sampling("image", "8 steps", 8, is_quick=True),
    Sampling("image", "8 steps, no guidance", 8, 1.0, methods=IN_SHORT),
    Sampling("image", "4 steps, no guidance", 4, 1.0, methods=IN_SHORT, is_quick=True),
    Sampling("video", "8 steps", 8, is_quick=True),
    Sampling("video", "8 steps, no guidance", 8, 1.0, methods=IN_SHORT),
    Sampling("video", "4 steps, no guidance", 4, 1.0, methods=IN_SHORT, is_quick=True),
)

Patch = Callable[[Any], Any]
"""Makes a patched clone of a model."""


def main() -> None:
    """Run the judges that the command line asks for."""
    arguments = _arguments()
    if arguments.device == "cpu":
        use_cpu()

    from benchmarks.fidelity import page
    from benchmarks.machine import origin

    path = RESULTS / "fidelity.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if arguments.quick:
        result = {}
    every = {"pictures": methods()}
    every |= dict.fromkeys(("image", "video"), methods_of_transformers())
    names = IN_SUMMARY if arguments.quick else arguments.methods
    known = {name for each in every.values() for name in each}
    if unknown := set(names or ()) - known:
        raise SystemExit(f"--methods has {sorted(unknown)}; there are {', '.join(sorted(known))}")
    taken = origin(arguments.device, "bench --fidelity")
    taken["machine"] = taken["machine"]["description"]
    repeats = 1 if arguments.quick else arguments.repeats
    shown: dict[tuple[str, str], dict[str, Any]] = {}

    def chosen(judge: str, only: Sequence[str] | None = None) -> dict[str, Patch]:
        return {
            name: patch
            for name, patch in every[judge].items()
            if (names is None or name in names) and (only is None or name in only)
        }

    def keep(place: dict[str, Any], rows: dict[str, Any]) -> None:
        place |= {name: row | {"origin": taken} for name, row in rows.items()}

    for sampling in SAMPLINGS:
        patches = chosen(sampling.judge, sampling.methods)
        is_left_out = arguments.quick and not sampling.is_quick
        if sampling.judge in arguments.only and patches and not is_left_out:
            print(f"{sampling.judge}, {sampling.name}", flush=True)
            judge = judge_of(sampling, arguments.seeds)
            rows, pictures = judged(judge, patches, repeats)
            print(page.pictures_table(rows, sampling.name), flush=True)
            keep(result.setdefault(sampling.judge, {}).setdefault(sampling.name, {}), rows)
            shown[sampling.judge, sampling.name] = pictures
    # Rows that were read have strings for noise levels.
    result = json.loads(json.dumps(result))
    summary = page.summary(result)
    if not arguments.quick:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for (of, name), pictures in shown.items():
            sheet = RESULTS / page.sheet_name(of, name)
            page.strips(pictures, list(result[of][name]), sheet)
        page.plot(result, RESULTS / "fidelity.webp")
        text = page.markdown(result, summary)
        (RESULTS / "fidelity.md").write_text(text, encoding="utf-8")
    print(summary)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --fidelity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="print the main methods, keep nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    parser.add_argument("--seeds", type=int, default=1, help="pictures of each photo")
    parser.add_argument("--only", nargs="+", choices=JUDGES, default=[*JUDGES])
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="take only these again")
    return parser.parse_args()


def methods() -> Mapping[str, Patch]:
    """Functions that patch a model, by name; the share in a name is that of the tokens merged."""
    from comfy_extras import nodes_hypertile, nodes_tomesd

    from benchmarks.fidelity.merging_methods import ours, preset
    from benchmarks.speed.methods import ToDoStrategy, TomesdStrategy

    def node(module: ModuleType, **inputs: Any) -> Callable[[Any], Any]:
        async def nodes() -> list[Any]:
            return await (await module.comfy_entrypoint()).get_node_list()

        (own,) = asyncio.run(nodes())
        return lambda model: own.EXECUTE_NORMALIZED(model=model, **inputs)[0]

    as_published = {"proportional_attn": False}
    keys = {"attn_tokens": "k,v"}
    window = {"strategy": "window"}
    wide = {**keys, **window, "sx": 4}
    return {
        TOMESD: ours(TomesdStrategy, **as_published),
        "core q 0.5": node(nodes_tomesd, ratio=0.5),
        TODO: ours(ToDoStrategy, ratio=0.75, **keys, **as_published),
        "HyperTile": node(
            nodes_hypertile, tile_size=256, swap_size=2, max_depth=0, scale_depth=False
        ),
        PAPER: ours(**as_published),
        "ours q,k,v 0.5": ours(),
        "ours q,k,v 0.5, window": ours(**window),
        "ours q,k,v 0.75, window": ours(ratio=0.75, **window),
        "ours q 0.25, k,v 0.5, window": ours(ratio=0.25, kv_ratio=0.5, **window),
        "ours k,v 0.5, unweighted": ours(**keys, **as_published),
        "ours k,v 0.5": ours(**keys),
        "ours k,v 0.75": ours(ratio=0.75, **keys),
        POOLED: ours(ratio=0.75, strategy="pool", **keys),
        "ours k,v 0.5, window 4x2": ours(**wide),
        KV75: ours(ratio=0.75, **wide),
        "ours k,v 0.78, window 4x2": ours(ratio=0.78, **wide),
        "ours quality 0.6": preset("quality"),
        "ours quality 0.75": preset("quality", 0.75),
        DEFAULT: preset("balanced"),
        BALANCED75: preset("balanced", 0.75),
        "ours balanced 0.6, one plan": preset("balanced", reuse_steps=1),
        "ours balanced 0.6, MLP too": preset("balanced", merge_mlp=True),
        FAST: preset("fast", 0.5),
        FAST_DEFAULT: preset("fast"),
        "ours fast 0.6, no full step": preset("fast", refresh_steps=0),
        "ours paper 0.6": preset("paper"),
    }


def methods_of_transformers() -> Mapping[str, Patch]:
    """As :func:`methods`, for the transformers; no other node merges in one."""
    from benchmarks.fidelity.merging_methods import ours, preset

    window = {"strategy": "window"}
    return {
        PAPER: ours(proportional_attn=False),
        "ours q,k,v 0.5, window": ours(**window),
        POOLED: ours(ratio=0.75, strategy="pool", attn_tokens="k,v"),
        "ours quality 0.6": preset("quality"),
        DEFAULT: preset("balanced"),
        BALANCED75: preset("balanced", 0.75),
        FAST: preset("fast", 0.5),
        FAST_DEFAULT: preset("fast"),
        "ours blocks 0.5": ours(scope="block", **window),
    }


def time_shares(taken: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Time over that of the plain model in the same round: median and quartiles over the rounds."""
    from benchmarks.speed.figures import spread

    shares = {}
    for name, each in taken.items():
        ratios = [own / plain for own, plain in zip(each, taken[PLAIN], strict=True)]
        low, median, high = spread(ratios)
        shares[name] = {"time": median, "quartiles": [low, high]}
    return shares


def judge_of(sampling: Sampling, seeds: int) -> "Judge":
    """The judge of a sampling."""
    from benchmarks.fidelity.judges import PictureTransformerJudge, VideoTransformerJudge
    from benchmarks.fidelity.pictures import PictureJudge

    judges = {
        "pictures": PictureJudge,
        "image": PictureTransformerJudge,
        "video": VideoTransformerJudge,
    }
    return judges[sampling.judge](sampling.steps, seeds, sampling.guidance, sampling.scheduler)


def judged(
    judge: "Judge", methods: Mapping[str, Patch], repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and pictures of every method by a judge, those of the plain model first.

    The time is that of all evaluations of a run.
    """
    from benchmarks.rounds import interleaved

    models = {PLAIN: judge.model, **{name: patch(judge.model) for name, patch in methods.items()}}
    pictures: dict[str, Any] = {}

    def seconds(name: str) -> float:
        is_first = name not in pictures
        pictures[name], taken = judge.paint(models[name])
        if is_first:
            error = judge.figures(pictures[name])["error"]
            if error == 0 and name != PLAIN:
                raise ValueError(f"{name} changed nothing")
            print(f"  {name}: {error:.4f} in {sum(taken):.1f} s", flush=True)
        return sum(taken)

    taken = interleaved({name: partial(seconds, name) for name in models}, repeats)
    shares = time_shares(taken)
    return {name: judge.figures(pictures[name]) | shares[name] for name in models}, pictures


if __name__ == "__main__":
    main()
