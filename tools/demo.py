"""The demo: a workflow on a real server, with ToMe off and on.

Imports from outside the standard library come late, because `dev.py demo --help` must work before
anything is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools import workflow
from tools.environment import ROOT
from tools.errors import ToolError
from tools.steps import timed

FOLDER = ROOT / "demo"
DEFAULT_WORKFLOW = ROOT / "workflows" / "api" / "tome_hires_fix.json"

NODES = ROOT / "tools" / "demo_nodes"
PROMPT = "a mushroom on green clouds"
"""What the demo's own model is asked for; it knows few words."""

# SD 1.5 has the real architecture and size, so it takes as long as a real checkpoint. SDXL is
# smaller than the real one, which would need 16 GB of memory.
CHECKPOINTS: dict[str, dict[str, Any]] = {"sd15": {"levels": 4, "full_width": True}, "sdxl": {}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="a real checkpoint; on a CPU, this can take an hour (default: a small trained model "
        "of stickers)",
    )
    model.add_argument(
        "--full",
        action="store_true",
        help="a checkpoint with the shapes of SD 1.5 and random weights, which takes as long as a "
        "real one, and paints noise",
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
    folders = {}
    if arguments.checkpoint or arguments.full:
        checkpoint = _checkpoint(arguments.checkpoint, graph)
        graph = workflow.with_checkpoint(graph, checkpoint.name)
        folders["checkpoints"] = checkpoint.parent
    else:
        graph = workflow.painted(graph, PROMPT)
        folders["custom_nodes"] = NODES
    _introduce(arguments)

    server = ComfyServer(FOLDER, device=arguments.device, arguments=search(folders, FOLDER))
    try:
        with timed("Starting the server"):
            server.start()
        with timed("Loading the model and warming up"):
            server.run(workflow.with_steps(workflow.with_scale(graph, 0.25), 1))
        comparison = compare(server, graph)
    finally:
        server.stop()

    print("", comparison.table(), "", *comparison.said(), "", sep="\n")
    if (pictures := comparison.pictures()) is not None:
        file = FOLDER / "off-and-on.jpg"
        pictures.save(file, quality=85, optimize=True)
        print(f"The two pictures: {_short(file)}")
    print(f"The pictures alone, as ComfyUI saved them: {_short(FOLDER / 'output')}")
    print(f"The server's log: {_short(server.log_file)}")


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


def search(folders: Mapping[str, Path], base: Path) -> list[str]:
    """The server's arguments that make it look into further folders.

    Args:
        folders: the folders, by what ComfyUI finds in them, such as `checkpoints`.
        base: the folder of the server's data; a file with the names of the folders goes there.
    """
    base.mkdir(exist_ok=True)
    configuration = base / "folders.yaml"
    # JSON is valid YAML.
    paths = {name: str(folder) for name, folder in folders.items()}
    configuration.write_text(json.dumps({"demo": paths}), encoding="utf-8")
    return [f"--extra-model-paths-config={configuration}"]


def _short(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _introduce(arguments: argparse.Namespace) -> None:
    model = "a small trained UNet with the layout of SDXL, without a text encoder and a VAE"
    if arguments.checkpoint:
        model = str(arguments.checkpoint)
    elif arguments.full:
        model = "random weights in the shapes of a checkpoint, so the pictures are noise"
    print(f"Workflow:   {_short(arguments.workflow)}, all its steps")
    print(f"Model:      {model}")
    print(f"Device:     {arguments.device}")
    print("Off and on: off sets the ratio of the ToMe nodes to 0, which is the plain model\n")
