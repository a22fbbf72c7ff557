"""Run a graph on a server with ToMe off and on, and compare the two."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from benchmarks.speed.figures import grid
from tools.server import ComfyServer
from tools.workflow import Graph, as_new_run, titles, without_merging

MERGED = re.compile(r"\[ToMe\] (?:.*: )?merged (?P<blocks>\d+/\d+) blocks \((?P<tokens>[^)]*)\)")
LEVEL = re.compile(r"(?P<before>\d+) -> (?P<after>\d+)\S* tokens(?: x(?P<blocks>\d+))?")
FORECAST = re.compile(r"\[ToMe\] .*forecast (?P<steps>\d+)/(?P<all>\d+) steps")
NOTHING_MERGED = re.compile(r"\[ToMe\] (?:.*: )?(?P<reason>nothing merged: .*)")
NOTHING = "-"


@dataclass
class Run:
    """One run: the seconds and the server's log for each node, and the last image."""

    seconds: dict[str, float]
    logs: dict[str, str]
    image: bytes | None


@dataclass
class Comparison:
    """The runs of a graph with ToMe off, which is ratio 0, and on, which is the graph as it is."""

    graph: Graph
    off: list[Run] = field(default_factory=list)
    on: list[Run] = field(default_factory=list)

    def measure(self, server: ComfyServer, repeats: int) -> None:
        """Run both variants `repeats` times in turn, showing the progress."""
        variants = (("off", without_merging(self.graph), self.off), ("on", self.graph, self.on))
        for repeat in range(repeats):
            # Each goes first in half of the rounds, so that a slow start favours neither.
            for label, graph, runs in variants[:: -1 if repeat % 2 else 1]:
                number = f"{label} {repeat + 1}/{repeats}"
                # Without a new number for each run, the server would answer from its cache.
                fresh = as_new_run(graph, len(self.off) + len(self.on) + 1)
                runs.append(_run(server, fresh, number.ljust(8)))

    def table(self) -> str:
        """The comparison, a line for each sampler and one for the whole run."""
        head = ("pass", "blocks", "off", "on", "off/on")
        samplers = titles(self.graph)
        rows = [self._row(node, samplers[node]) for node in self.on[0].seconds if node in samplers]
        times = self._times(lambda run: sum(run.seconds.values()))
        rows.append(("whole run", NOTHING, *times))
        return grid(head, rows)

    def levels(self) -> list[str]:
        """A line for each sampler that skipped steps, and for each level that merged."""
        lines = []
        for node, title in titles(self.graph).items():
            merged, forecast = (each.search(self.on[0].logs[node]) for each in (MERGED, FORECAST))
            if forecast is not None:
                lines.append(f"{title}: {forecast['steps']} of {forecast['all']} steps are skipped")
            if merged is None:
                continue
            for level in LEVEL.finditer(merged["tokens"]):
                before, after = int(level["before"]), int(level["after"])
                blocks = level["blocks"] or merged["blocks"].partition("/")[0]
                share = 1 - after / before
                lines.append(f"{title}: {share:.0%} of {before} tokens merge in {blocks} blocks")
        return lines

    def has_plain_pass(self) -> bool:
        """Whether some sampler merged and skipped nothing even with ToMe on."""
        logs = [self.on[0].logs[node] for node in titles(self.graph)]
        return not all(MERGED.search(log) or FORECAST.search(log) for log in logs)

    def warnings(self) -> list[str]:
        """The pack's warnings that nothing was merged."""
        logs = "\n".join(self.on[0].logs.values())
        return [line["reason"] for line in NOTHING_MERGED.finditer(logs)]

    def _row(self, node: str, title: str) -> tuple[str, ...]:
        merged = MERGED.search(self.on[0].logs[node])
        blocks = merged["blocks"] if merged else NOTHING
        times = self._times(lambda run: run.seconds[node])
        return title, blocks, *times

    def _times(self, seconds_of: Any) -> tuple[str, str, str]:
        off, on = (min(map(seconds_of, runs)) for runs in (self.off, self.on))
        return f"{off:.2f} s", f"{on:.2f} s", f"{off / on:.2f}"


def _run(server: ComfyServer, graph: Graph, label: str) -> Run:
    """Run a graph, say when each sampler is done, and keep the server's log for each node."""
    logs: dict[str, str] = {}
    samplers = titles(graph)
    node: str | None = None
    logged = 0

    def watch(event: dict[str, Any]) -> None:
        nonlocal node, logged
        if event["type"] != "executing":
            return
        log = server.log
        if node is not None:
            logs[node] = log[logged:]
        if node in samplers:
            print(f"{label} {samplers[node]}: done", flush=True)
        node, logged = event["data"]["node"], len(log)

    history = server.run(graph, watch)
    images = server.images(history)
    return Run(history["seconds"], logs, images[-1] if images else None)
