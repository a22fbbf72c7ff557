"""The demo: a workflow on a real server, with ToMe off and on.

Imports from outside the standard library come late, because `dev.py demo --help` must work before
anything is installed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tools import workflow
from tools.environment import ROOT
from tools.errors import ToolError
from tools.steps import timed

FOLDER = ROOT / "demo"
DEFAULT_WORKFLOW = ROOT / "workflows" / "api" / "tome_hires_fix.json"

# What a CPU can run in a few minutes. The size stays, as larger pictures merge more.
CPU_STEPS = 1

# SD 1.5 has the real architecture and size, so it takes as long as a real checkpoint. SDXL is
# smaller than the real one, which would need 16 GB of memory.
CHECKPOINTS: dict[str, dict[str, Any]] = {"sd15": {"levels": 4, "full_width": True}, "sdxl": {}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="a real checkpoint (default: one with random weights, which is made first)",
    )
    parser.add_argument(
        "--workflow",
        type=Path,
        default=DEFAULT_WORKFLOW,
        metavar="FILE",
        help="a workflow in the API format that has a ToMe Patch Model node "
        f"(default: {DEFAULT_WORKFLOW.relative_to(ROOT).as_posix()})",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="run the workflow with all its steps even on a CPU; this can take an hour",
    )


def read_graph(arguments: argparse.Namespace) -> workflow.Graph:
    """Read the chosen workflow; raises if the demo cannot run with these options."""
    graph = workflow.load_graph(arguments.workflow)
    if not workflow.merges(graph):
        raise ToolError(
            f"{arguments.workflow} has no ToMe Patch Model node with a ratio above 0, so there is "
            "nothing to compare. Put one before a sampler."
        )
    if arguments.checkpoint and not arguments.checkpoint.is_file():
        raise ToolError(f"--checkpoint is {arguments.checkpoint}, which is not a file.")
    return graph


def run(arguments: argparse.Namespace) -> None:
    """Run the demo with the options of `add_arguments`."""
    from tools.comparison import compare
    from tools.server import ComfyServer

    graph = read_graph(arguments)
    checkpoint = _checkpoint(arguments.checkpoint, graph)
    graph = workflow.with_checkpoint(graph, checkpoint.name)
    shrink = arguments.device == "cpu" and not arguments.full
    if shrink:
        graph = workflow.with_steps(graph, CPU_STEPS)
    _introduce(arguments, shrink)

    server = ComfyServer(FOLDER, device=arguments.device, arguments=_model_folder(checkpoint))
    try:
        with timed("Starting the server"):
            server.start()
        with timed("Loading the checkpoint and warming up"):
            server.run(workflow.with_steps(workflow.with_scale(graph, 0.25), 1))
        comparison = compare(server, graph)
    finally:
        server.stop()

    print("", comparison.table(), "", *comparison.said(), sep="\n")
    for name, run in (("off", comparison.off), ("on", comparison.on)):
        if run.image is not None:
            file = FOLDER / f"tome_{name}.png"
            file.write_bytes(run.image)
            print(f"Image with ToMe {name}: {_short(file)}")


def _checkpoint(chosen: Path | None, graph: workflow.Graph) -> Path:
    """The chosen checkpoint, or else a generated one that fits the graph."""
    if chosen is not None:
        return chosen.resolve()
    is_sdxl = any("xl" in name.lower() for name in workflow.checkpoint_names(graph))
    family = "sdxl" if is_sdxl else "sd15"
    file = FOLDER / "models" / "checkpoints" / f"tome_demo_{family}.ckpt"
    if not file.exists():
        from models.checkpoints import write_checkpoint

        write_checkpoint(file, family, **CHECKPOINTS[family])
    return file


def _model_folder(checkpoint: Path) -> list[str]:
    """The server's arguments to also look for checkpoints in the folder of `checkpoint`."""
    if checkpoint.is_relative_to(FOLDER):
        return []
    configuration = FOLDER / "model_folders.yaml"
    # JSON is valid YAML.
    folders = {"demo": {"checkpoints": str(checkpoint.parent)}}
    FOLDER.mkdir(exist_ok=True)
    configuration.write_text(json.dumps(folders), encoding="utf-8")
    return [f"--extra-model-paths-config={configuration}"]


def _short(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _introduce(arguments: argparse.Namespace, shrink: bool) -> None:
    print(f"Workflow:   {_short(arguments.workflow)}")
    if arguments.checkpoint:
        print(f"Checkpoint: {arguments.checkpoint}")
    else:
        print("Checkpoint: random weights, so the images are noise; --checkpoint takes a real one")
    if shrink:
        print(
            f"Device:     cpu, so {CPU_STEPS} step in each pass and none to skip; --full runs all"
        )
    else:
        print(f"Device:     {arguments.device}")
    print("Off and on: off sets the ratio of the ToMe nodes to 0, which is the plain model\n")
