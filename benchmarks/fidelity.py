"""Error against time saved, by three judges: features in one block, and the pictures of a trained
UNet and of a trained transformer.

python3 dev.py bench --fidelity [--quick] [--steps 12] [--seeds 1] [--only features pictures image]
    [--methods NAME ...]

With ``--methods``, the rows of the others stay as they are.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.environment import comfyui_directory  # noqa: E402

if str(comfyui_directory()) not in sys.path:
    sys.path.insert(0, str(comfyui_directory()))

from comfy.cli_args import args as host_arguments  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TOMESD, TODO = "tomesd q,k,v 0.5", "ToDo k,v 0.75"
DEFAULT, KV75 = "ours balanced 0.6", "ours k,v 0.75, window 4x2"
FAST, PAPER = "ours fast 0.5", "ours q,k,v 0.5, unweighted"

IMAGES = {"8 steps": (8, 2.0), "4 steps, no guidance": (4, 1.0)}
"""The number of steps and the guidance of each sampling of the transformer, by name."""

Patch = Callable[[Any], Any]
"""Makes a patched clone of a model."""


def main() -> None:
    """Run the judges that the command line asks for."""
    arguments = _arguments()
    host_arguments.cpu = arguments.device == "cpu"
    host_arguments.use_pytorch_cross_attention = True

    from benchmarks import fidelity_figures
    from benchmarks.machine import origin

    taken = origin(arguments.device, "--fidelity")
    taken["machine"] = taken["machine"]["description"]
    path = RESULTS / "fidelity.json"
    RESULTS.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
    chosen = methods()
    if arguments.methods:
        every = [*chosen, *(name for name in methods_of_transformers() if name not in chosen)]
        if unknown := set(arguments.methods) - set(every):
            raise SystemExit(f"--methods has {sorted(unknown)}; there are {', '.join(every)}")
        chosen = {name: patch for name, patch in chosen.items() if name in arguments.methods}
        kept = [
            each
            for each in result.get("later", [])
            if not set(each["methods"]) <= set(arguments.methods)
        ]
        result["later"] = [*kept, taken | {"methods": arguments.methods}]
    else:
        result |= {**taken, "later": []}
    repeats = 2 if arguments.quick else arguments.repeats
    if "features" in arguments.only and chosen:
        figures = judge_features(chosen, repeats)
        print(fidelity_figures.features_table(figures), flush=True)
        result["features"] = {**(result["features"] if arguments.methods else {}), **figures}
        if not arguments.methods:
            result["bias"] = bias_costs(3 if arguments.quick else 15)
    if "image" in arguments.only:
        of_transformer = {
            name: patch
            for name, patch in methods_of_transformers().items()
            if not arguments.methods or name in arguments.methods
        }
        samplings = list(IMAGES)[:1] if arguments.quick else list(IMAGES)
        images, shown = judge_images(of_transformer, samplings, arguments.seeds, min(repeats, 3))
        kept = result.get("image", {}) if arguments.methods else {}
        result["image"] = {
            sampling: {**kept.get(sampling, {}), **figures} for sampling, figures in images.items()
        }
        for sampling, figures in images.items():
            print(fidelity_figures.pictures_table(figures, sampling), flush=True)
            strips = RESULTS / f"fidelity-image-{sampling.split()[0]}.png"
            fidelity_figures.strips(shown[sampling], list(result["image"][sampling]), strips)
    if "pictures" in arguments.only and chosen:
        steps = 3 if arguments.quick else arguments.steps
        figures, pictures = judge_pictures(chosen, steps, arguments.seeds, repeats)
        print(fidelity_figures.pictures_table(figures), flush=True)
        result["pictures"] = {**(result["pictures"] if arguments.methods else {}), **figures}
        strips = RESULTS / "fidelity-strips.png"
        fidelity_figures.strips(pictures, list(result["pictures"]), strips)
    text = json.dumps(result, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")
    # The noise levels of earlier rows are strings.
    result = json.loads(text)
    fidelity_figures.plot(result, RESULTS / "fidelity.png")
    names = (DEFAULT, KV75, TOMESD, TODO, FAST, PAPER)
    summary = fidelity_figures.summary(result, *names, speed_up=fast_speed_up())
    text = fidelity_figures.markdown(result, summary)
    (RESULTS / "fidelity.md").write_text(text, encoding="utf-8")
    print(summary)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --fidelity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats and sampling steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds")
    parser.add_argument("--steps", type=int, default=12, help="sampling steps of a picture")
    parser.add_argument("--seeds", type=int, default=1, help="pictures of each photo")
    judges = ("features", "pictures", "image")
    parser.add_argument("--only", nargs="+", choices=judges, default=judges)
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="take only these again")
    return parser.parse_args()


def ours(other: Callable[..., Any] | None = None, /, **settings: Any) -> Patch:
    """Our patch with some settings, on maps of any size; ``other`` makes another strategy."""
    from tome_nodes.config import ToMeConfig
    from tome_nodes.hosts.comfyui.attachment import attach

    own: dict[str, Any] = {} if other is None else {"make_strategy": other}
    config = ToMeConfig(**{"ratio": 0.5, **settings, "min_tokens": 1})
    return partial(attach, config=config, **own)


def preset(name: str, ratio: float = 0.6, **others: Any) -> Patch:
    """Our patch with a preset; ``others`` are settings that it decides otherwise."""
    from tome_nodes.presets import settings_of

    return ours(**{**settings_of(name, {"ratio": ratio}), **others})


def methods() -> Mapping[str, Patch]:
    """Functions that patch a model, by name; the share in a name is that of the tokens merged."""
    from comfy_extras import nodes_hypertile, nodes_tomesd

    from benchmarks.methods import ToDoStrategy, TomesdStrategy

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
        "ours q,k,v 0.5, unweighted": ours(**as_published),
        "ours q,k,v 0.5": ours(),
        "ours q,k,v 0.5, window": ours(**window),
        "ours q,k,v 0.75, window": ours(ratio=0.75, **window),
        "ours q 0.25, k,v 0.5, window": ours(ratio=0.25, kv_ratio=0.5, **window),
        "ours k,v 0.5, unweighted": ours(**keys, **as_published),
        "ours k,v 0.5": ours(**keys),
        "ours k,v 0.75": ours(ratio=0.75, **keys),
        "ours k,v pooled 0.75": ours(ratio=0.75, strategy="pool", **keys),
        "ours k,v 0.5, window 4x2": ours(**wide),
        KV75: ours(ratio=0.75, **wide),
        "ours k,v 0.78, window 4x2": ours(ratio=0.78, **wide),
        "ours quality 0.6": preset("quality"),
        "ours quality 0.75": preset("quality", 0.75),
        DEFAULT: preset("balanced"),
        "ours balanced 0.75": preset("balanced", 0.75),
        "ours balanced 0.6, one plan": preset("balanced", reuse_steps=1),
        "ours balanced 0.6, MLP too": preset("balanced", merge_mlp=True),
        "ours fast 0.5": preset("fast", 0.5),
        "ours fast 0.6": preset("fast"),
        "ours fast 0.6, no full step": preset("fast", refresh_steps=0),
        "ours paper 0.6": preset("paper"),
    }


def methods_of_transformers() -> Mapping[str, Patch]:
    """As :func:`methods`, for the transformer; no other node merges in one."""
    window = {"strategy": "window"}
    return {
        PAPER: ours(proportional_attn=False),
        "ours q,k,v 0.5, window": ours(**window),
        "ours quality 0.6": preset("quality"),
        "ours balanced 0.6": preset("balanced"),
        "ours fast 0.5": preset("fast", 0.5),
        "ours fast 0.6": preset("fast"),
        "ours blocks 0.5": ours(scope="block", **window),
    }


ONLY_OF_RUNS = frozenset({"ours balanced 0.6, one plan", "ours fast 0.6, no full step"})
"""Methods that differ from another one only in a run of a model of several blocks."""


def judge_features(methods: Mapping[str, Callable[[Any], Any]], repeats: int) -> dict[str, Any]:
    """Errors of every method at every noise level, and its time as a share of the plain block's."""
    import torch

    from benchmarks.features import FeatureJudge

    with torch.no_grad():
        judge = FeatureJudge()
        patched = {
            name: patch(judge.model) for name, patch in methods.items() if name not in ONLY_OF_RUNS
        }
        errors = {name: judge.errors(each) for name, each in patched.items()}
        for name, levels in errors.items():
            if not all(places["block"] > 0 for places in levels.values()):
                raise ValueError(f"{name} changed nothing")
        shares = time_shares(judge.seconds, {"plain": judge.model, **patched}, repeats)
    return {name: {"errors": errors[name], **shares[name]} for name in patched}


def time_shares(
    seconds: Callable[[Any], float], models: Mapping[str, Any], repeats: int
) -> dict[str, dict[str, Any]]:
    """Time over that of ``plain`` in the same round: its median and quartiles over the rounds."""
    from benchmarks.figures import spread
    from benchmarks.rounds import interleaved

    runs = {name: (lambda model=model: seconds(model)) for name, model in models.items()}
    taken = interleaved(runs, repeats)
    shares = {}
    for name, each in taken.items():
        ratios = [own / plain for own, plain in zip(each, taken["plain"], strict=True)]
        low, median, high = spread(ratios)
        shares[name] = {"time": median, "quartiles": [low, high]}
    return shares


def judge_pictures(
    methods: Mapping[str, Patch], steps: int, seeds: int, repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and pictures of every method, by the UNet."""
    from benchmarks.pictures import PictureJudge

    return _painted(PictureJudge(steps, seeds), methods, repeats)


def judge_images(
    methods: Mapping[str, Patch], samplings: Sequence[str], seeds: int, repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and pictures of every method, by the transformer, in each sampling of IMAGES."""
    from benchmarks.judges import PictureTransformerJudge

    figures, pictures = {}, {}
    for sampling in samplings:
        print(sampling, flush=True)
        steps, guidance = IMAGES[sampling]
        judge = PictureTransformerJudge(steps, seeds, guidance)
        figures[sampling], pictures[sampling] = _painted(judge, methods, repeats)
    return figures, pictures


def _painted(
    judge: Any, methods: Mapping[str, Patch], repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and pictures of every method, those of the plain model first."""
    plain, pictures = judge.measure(judge.model)
    figures, shown = {"plain": plain}, {"plain": pictures}
    patched = {name: patch(judge.model) for name, patch in methods.items()}
    merging = {"plain": 0.0}
    for name, model in patched.items():
        figures[name], shown[name] = judge.measure(model)
        if figures[name]["error"] == 0:
            raise ValueError(f"{name} changed nothing")
        merging[name] = _share_of_steps(model)
        print(f"  {name}: {figures[name]['error']:.4f}", flush=True)
    shares = time_shares(judge.seconds, {"plain": judge.model, **patched}, repeats)
    for name, share in shares.items():
        # The one step that is timed merges; some of a run do not.
        own = merging[name]
        share["time"] = own * share["time"] + 1 - own
        share["quartiles"] = [own * each + 1 - own for each in share["quartiles"]]
        figures[name] |= share
    return figures, shown


def _share_of_steps(model: Any) -> float:
    """The share of the steps of the last run that merged; all of those of other nodes do."""
    from tome_nodes.hosts.comfyui.attachment import last_run

    run = last_run(model)
    return 1.0 if run is None else run.counts.merged_steps / run.counts.total_steps


def fast_speed_up() -> float:
    """How many times faster preset fast runs transformers of published widths, by their blocks.

    The least of the models of 1024x1024 pixels that ``dev.py bench --transformers`` has timed, at a
    ratio of 0.5, in runs of :data:`IMAGES`.
    """
    from tome_nodes.config import ToMeConfig
    from tome_nodes.core.refresh import is_full
    from tome_nodes.core.schedule import Moment
    from tome_nodes.presets import settings_of

    config = ToMeConfig(**settings_of("fast", {"ratio": 0.5}))
    text = (RESULTS / "transformers.json").read_text(encoding="utf-8")
    blocks = [each for each in json.loads(text)["blocks"] if each["tokens"] == 4096]
    times = []
    for steps, _ in IMAGES.values():
        moments = [Moment(step, 0.0, step, None, True, steps - 1 - step) for step in range(steps)]
        full = sum(is_full(config, moment) for moment in moments) / steps
        times += [full + (1 - full) / each["speed_up"]["whole block 0.5"] for each in blocks]
    return 1 / max(times)


def bias_costs(repeats: int) -> dict[str, float]:
    """Time of attention with weighed keys over that without, by number of keys; 8 heads of 40."""
    import time
    from functools import partial

    import torch
    from comfy.ldm.modules.attention import optimized_attention

    from benchmarks.rounds import interleaved
    from tome_nodes.hosts.comfyui.attention import weigh_attention
    from tome_nodes.ops import reference

    def seconds(qkv: tuple[torch.Tensor, ...], options: dict[str, Any]) -> float:
        start = time.perf_counter()
        optimized_attention(*qkv, 8, transformer_options=options)
        return time.perf_counter() - start

    costs = {}
    for keys in (2048, 4096):
        q, k, v = (torch.randn(1, tokens, 320) for tokens in (4096, keys, keys))
        sizes = torch.randint(1, 5, (1, keys)).log()
        options = {"plain": {}, "weighed": weigh_attention({}, sizes, reference, lambda _: None)}
        runs = {name: partial(seconds, (q, k, v), each) for name, each in options.items()}
        times = interleaved(runs, repeats)
        costs[str(keys)] = min(times["weighed"]) / min(times["plain"]) - 1
    return costs


if __name__ == "__main__":
    main()
