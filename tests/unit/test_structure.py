"""Imports run one way, and what belongs to one place stands there only."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tome_nodes"
FILES = sorted(PACKAGE.rglob("*.py"))

_MERGING = {"settings", "reasons", "ranks", "ops", "strategies", "merging"}
LAYERS = {
    "settings": set(),
    "reasons": set(),
    "ranks": {"reasons"},
    "ops": set(),
    "skipping": {"reasons"},
    "strategies": {"settings", "ops"},
    "merging": _MERGING - {"merging"},
    "tuning": {"settings", "merging"},
    "run": {*_MERGING, "skipping", "tuning"},
    "report": {*_MERGING, "run", "tuning"},
    "comfyui": {*_MERGING, "skipping", "run", "report", "tuning"},
    "python": {*_MERGING, "skipping", "run"},
    "__init__": {"python"},
}
"""The other parts of the package that each part may import."""


def name_of(file):
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(file): file for file in FILES}


@cache
def nodes_of(file):
    """The nodes of the syntax tree of a file."""
    return [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def imports_of(name):
    """The modules of the package that one imports, including imports in functions."""
    file = MODULES[name]
    here = [] if name == "__init__" else name.split(".")
    if file.name != "__init__.py":
        here = here[:-1]
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) + 1 - node.level]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield inner if inner in MODULES else ".".join(base)


def imported_modules(file):
    """Those of other libraries, with their full names."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_no_module_imports_in_a_circle():
    graph = {name: set(imports_of(name)) - {name} for name in MODULES}
    assert "merging.model_run" in graph["comfyui.merging_part"]
    assert set(TopologicalSorter(graph).static_order()) >= set(graph)


def test_each_part_imports_only_what_lies_below_it():
    for name in MODULES:
        part = name.partition(".")[0]
        others = {other.partition(".")[0] for other in imports_of(name)} - {part}
        assert others <= LAYERS[part], name


def test_only_a_host_knows_its_libraries():
    """Of all others, ``tests/hosts/test_security.py`` says which may be imported."""
    hosts = {
        "comfy": {"comfyui"},
        "comfy_execution": {"comfyui"},
        "comfyui_version": {"comfyui"},
        "folder_paths": {"comfyui"},
        "server": {"comfyui"},
        "comfy_api": {"comfyui.nodes"},
        "comfy_extras": {"comfyui.tune"},
        "diffusers": {"python"},
        "triton": {"ops.triton"},
    }
    seen = set()
    for name, file in MODULES.items():
        for module in imported_modules(file):
            library = module.partition(".")[0]
            if library in hosts:
                seen.add(library)
                assert name.startswith(tuple(hosts[library])), f"{name} imports {library}"
    assert seen == hosts.keys()


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        # The schema of nodes of one version; comfy_api.latest changes with the host.
        ("comfy_api", {"comfy_api.v0_0_2"}),
        # What earlier versions have, too.
        ("triton", {"triton", "triton.language"}),
    ],
)
def test_only_modules_of_these_libraries_that_stay_are_imported(library, expected):
    modules = {module for file in FILES for module in imported_modules(file)}
    assert {module for module in modules if module.startswith(library)} == expected
