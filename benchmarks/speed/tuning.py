"""Does ToMe Tune keep its word? What it finds through the HTTP queue, measured again.

A server samples the workflow of ToMe Tune with the first level of Stable Diffusion 1.5's UNet, of
the published width and with random weights. Then the settings that it found are timed here against
the unpatched model, in turn.
"""

import argparse
import json
import logging
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from models.checkpoints import write_checkpoint  # noqa: E402

from benchmarks.rounds import interleaved  # noqa: E402
from benchmarks.speed.figures import spread  # noqa: E402
from benchmarks.speed.record import Record, say  # noqa: E402
from tome_nodes.comfyui.attachment import attach  # noqa: E402
from tome_nodes.comfyui.validation import config_of  # noqa: E402
from tools.server import ComfyServer  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
WORKFLOW = ROOT / "workflows" / "api" / "tome_tune.json"
CHECKPOINT = "sd15.ckpt"
LEVELS = 1
"""Levels of the UNet, out of four."""
CONTEXT_CHANNELS = 768
STEPS = 8
ROUNDS = 3
"""Timed runs of each model."""


def main() -> int:
    """Tune, measure again, and record both; 1 if what was asked for does not hold."""
    arguments = _arguments()
    logging.getLogger("tome_nodes").setLevel(logging.ERROR)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        file = write_checkpoint(base / "models" / "checkpoints" / CHECKPOINT, "sd15", levels=LEVELS)
        with ComfyServer(base) as server:
            nothing = tuned(server, 256, 1.0)
            found = tuned(server, arguments.size, arguments.wish)
        say(found["text"])
        seconds = timed(file, found["settings"], arguments.size)
    again = spread([plain / own for plain, own in zip(*seconds.values(), strict=True)])
    record = Record("tune", "bench --tune", RESULTS)
    record.result |= {
        "size": arguments.size,
        "steps": STEPS,
        "wish": arguments.wish,
        "found": found,
        "wish of 1.0 at 256": nothing,
        "seconds": seconds,
        "times as fast, measured again": again,
    }
    least, middle, most = again
    say(f"\nA wish of 1.0 at 256: {nothing['text']}")
    say(f"Measured again: {least:.2f} to {most:.2f} times as fast")
    if most < arguments.wish:
        record.result["failed"]["wish"] = "what was found is slower"
    if nothing["settings"]["ratio"] != 0:
        record.result["failed"]["wish of 1.0 at 256"] = "something merges"
    return record.finish(
        {
            "wish": arguments.wish,
            "found": found["speed"],
            "again": middle,
            "settings": json.dumps(found["settings"]),
            "at_256": json.dumps(nothing["settings"]),
        }
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --tune", description=__doc__)
    parser.add_argument("--wish", type=float, default=1.2, help="times as fast")
    parser.add_argument("--size", type=int, default=512, help="pixels across and down")
    return parser.parse_args()


def tuned(server: ComfyServer, size: int, wish: float) -> dict[str, Any]:
    """What ToMe Tune returns through the queue: its text, its settings and their speed."""
    graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    by_class = {node["class_type"]: node["inputs"] for node in graph.values()}
    by_class["CheckpointLoaderSimple"]["ckpt_name"] = CHECKPOINT
    by_class["EmptyLatentImage"] |= {"width": size, "height": size}
    by_class["ToMeTune"] |= {"goal": "speed", "speed_up": wish, "steps": STEPS}
    by_class["KSampler"]["steps"] = 1
    (number,) = (name for name, node in graph.items() if node["class_type"] == "ToMeTune")
    graph["shown"] = {"class_type": "PreviewAny", "inputs": {"source": [number, 3]}}
    outputs = server.run(graph)["outputs"]
    (text,), (settings,) = outputs[number]["text"], outputs["shown"]["text"]
    speed = re.search(r"^(?:Found|Taken): .*: (\S+) times as fast", text, re.MULTILINE)
    return {
        "text": text,
        "settings": json.loads(settings),
        "speed": float(speed[1]) if speed else 1.0,
    }


def timed(file: Path, settings: dict[str, Any], size: int) -> dict[str, list[float]]:
    """Seconds of sampling runs of the unpatched and the patched model, in turn."""
    model = comfy.sd.load_checkpoint_guess_config(str(file), output_vae=False, output_clip=False)[0]
    models = {"unpatched": model, "patched": attach(model, config_of(json.dumps(settings)))}
    side = size // 8
    latent = torch.zeros(1, 4, side, side)
    noise = comfy.sample.prepare_noise(latent, 1)
    prompt = [[torch.zeros(1, 77, CONTEXT_CHANNELS), {}]]

    def seconds(name: str, steps: int = STEPS) -> float:
        began = time.perf_counter()
        comfy.sample.sample(
            models[name],
            *(noise, steps, 7.0, "dpmpp_2m", "karras", prompt, prompt, latent),
            disable_pbar=True,
        )
        return time.perf_counter() - began

    for name in models:
        seconds(name, 1)
    return interleaved({name: partial(seconds, name) for name in models}, ROUNDS)


if __name__ == "__main__":
    sys.exit(main())
