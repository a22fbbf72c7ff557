"""Whole blocks on merged tokens: how much they change pictures and videos, by three trained judges.

python3 dev.py bench --front [--judges unet picture video] [--only NAME ...] [--steps 12]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.environment import comfyui_directory  # noqa: E402

if str(comfyui_directory()) not in sys.path:
    sys.path.insert(0, str(comfyui_directory()))

from comfy.cli_args import args as host_arguments  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

BLOCK = {"strategy": "window", "scope": "block"}
KEYS = {"strategy": "window", "attn_tokens": "k,v", "sx": 4}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "tomesd q,k,v": {"proportional_attn": False, "ratio": 0.5},
    "balanced": {**KEYS, "ratio": 0.6},
    "blocks 0.3": {**BLOCK, "ratio": 0.3},
    "blocks 0.5": {**BLOCK, "ratio": 0.5},
    "blocks 0.6": {**BLOCK, "ratio": 0.6},
    "blocks 0.5, cells of 4x2": {**BLOCK, "ratio": 0.5, "sx": 4},
    "blocks 0.5, one plan": {**BLOCK, "ratio": 0.5, "reuse_steps": 1},
    "blocks 0.5, no random picks": {**BLOCK, "ratio": 0.5, "use_rand": False},
    "blocks 0.5 to 0.8": {**BLOCK, "ratio": 0.5, "end_percent": 0.8},
    "blocks 0.5 to 0.6": {**BLOCK, "ratio": 0.5, "end_percent": 0.6},
    "blocks 0.5 from 0.2": {**BLOCK, "ratio": 0.5, "start_percent": 0.2},
    "blocks 0.7 falling to 0.3": {**BLOCK, "ratio": 0.7, "ratio_end": 0.3},
    "blocks 0.3 rising to 0.7": {**BLOCK, "ratio": 0.3, "ratio_end": 0.7},
    "stack 0.5": {"strategy": "window", "scope": "stack", "ratio": 0.5},
}
"""Settings by name."""


def main() -> int:
    """Run the command line."""
    arguments = _arguments()
    host_arguments.cpu = True
    host_arguments.use_pytorch_cross_attention = True

    from benchmarks.judges import PictureTransformerJudge, VideoTransformerJudge
    from benchmarks.machine import origin
    from benchmarks.pictures import PictureJudge
    from tome_nodes.config import ToMeConfig
    from tome_nodes.hosts.comfyui.attachment import attach

    judges = {
        "unet": PictureJudge,
        "picture": PictureTransformerJudge,
        "video": VideoTransformerJudge,
    }
    path = RESULTS / f"{arguments.name}.json"
    result: dict[str, Any] = {"judges": {}}
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
    result |= origin("cpu", "--front")
    for name in arguments.judges:
        judge = judges[name](arguments.steps, arguments.seeds)
        rows = result["judges"].setdefault(name, {})
        for variant in arguments.only:
            config = ToMeConfig(**{**VARIANTS[variant], "min_tokens": 1})
            rows[variant], _ = judge.measure(attach(judge.model, config))
            print(name, variant, {k: round(v, 4) for k, v in rows[variant].items()}, flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --front", description=__doc__)
    judges = ["unet", "picture", "video"]
    parser.add_argument("--judges", nargs="+", choices=judges, default=judges)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=12, help="sampling steps")
    parser.add_argument("--seeds", type=int, default=1, help="pictures of each photo")
    parser.add_argument("--name", default="front", help="of the files of results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
