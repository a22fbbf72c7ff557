"""Run a graph on a server with ToMe off and on, and compare the two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image

from benchmarks.sheet import sheet
from benchmarks.speed.figures import grid
from tools.server import ComfyServer
from tools.workflow import Graph, as_new_run, titles, without_merging

SAID = re.compile(r"\[ToMe\] .*")


@dataclass(frozen=True)
class Run:
    """One run: the seconds and the server's log for each node, and the last image."""

    seconds: dict[str, float]
    logs: dict[str, str]
    image: bytes | None


@dataclass(frozen=True)
class Comparison:
    """The runs of a graph with ToMe off, which is ratio 0, and on, which is the graph as it is."""

    graph: Graph
    off: Run
    on: Run

    def table(self) -> str:
        """Seconds and times faster, in a line for each sampler and one for the whole run."""
        off, on, names = self.off.seconds, self.on.seconds, titles(self.graph)
        rows = [(names[node], off[node], on[node]) for node in on if node in names]
        rows.append(("whole run", sum(off.values()), sum(on.values())))
        cells = [(name, f"{a:.2f} s", f"{b:.2f} s", f"{a / b:.2f}") for name, a, b in rows]
        return grid(("pass", "off", "on", "off/on"), cells)

    def said(self) -> list[str]:
        """What the pack logged of each sampler with ToMe on."""
        return [
            f"{title}: {line}"
            for node, title in titles(self.graph).items()
            for line in SAID.findall(self.on.logs[node]) or ["without ToMe, the same off and on"]
        ]

    def pictures(self) -> Image.Image | None:
        """The last images side by side, with their seconds; None if a run has none."""
        columns = {
            name: [Image.open(BytesIO(run.image)).convert("RGB")]
            for name, run in (("off", self.off), ("on", self.on))
            if run.image is not None
        }
        if len(columns) < 2:
            return None
        off, on, names = self.off.seconds, self.on.seconds, titles(self.graph)
        nodes = [node for node in names if SAID.search(self.on.logs[node])]
        lines = [(names[node], off[node], on[node]) for node in nodes]
        lines.append(("Whole run", sum(off.values()), sum(on.values())))
        before = [f"{name}: {a:.1f} s" for name, a, _ in lines]
        after = [f"{name}: {b:.1f} s, {a / b:.1f} times as fast" for name, a, b in lines]
        return sheet(columns, {"off": ["ToMe off", *before], "on": ["ToMe on", *after]})


def compare(server: ComfyServer, graph: Graph) -> Comparison:
    """Run a graph with ToMe off and on, showing the progress."""
    # Without a new number for each run, the server would answer from its cache.
    off = _run(server, as_new_run(without_merging(graph), 1), "off:")
    on = _run(server, as_new_run(graph, 2), "on: ")
    return Comparison(graph, off, on)


def _run(server: ComfyServer, graph: Graph, label: str) -> Run:
    """Run a graph, show the steps of each sampler, and keep the server's log for each node."""
    logs: dict[str, str] = {}
    samplers = titles(graph)
    node: str | None = None
    logged = shown = 0

    def watch(event: dict[str, Any]) -> None:
        nonlocal node, logged, shown
        if event["type"] == "progress" and node in samplers:
            # Steps that follow each other quickly come as one event.
            print("." * (event["data"]["value"] - shown), end="", flush=True)
            shown = event["data"]["value"]
        if event["type"] != "executing":
            return
        log = server.log
        if node is not None:
            logs[node] = log[logged:]
        if node in samplers:
            print(" done", flush=True)
        node, logged, shown = event["data"]["node"], len(log), 0
        if node in samplers:
            print(f"ToMe {label} {samplers[node]} ", end="", flush=True)

    history = server.run(graph, watch)
    images = server.images(history)
    return Run(history["seconds"], logs, images[-1] if images else None)
