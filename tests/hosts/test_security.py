"""What is published runs no code but its own, and touches neither files nor the network.

This asks for more than the registry's standards (docs.comfy.org, "Standards"). One module keeps
measurements in the host's user folder.
"""

import ast
import re
from pathlib import Path

import pytest
from common import run_tool

from tools.environment import ROOT
from tools.pack import copy_pack, published_files

PUBLISHED = published_files()
PYTHON = [file for file in PUBLISHED if file.suffix == ".py"]
SCRIPTS = [file for file in PUBLISHED if file.suffix == ".js"]

KINDS = {".py", ".js", ".json", ".jpg", ".md", ".svg", ".toml", ""}
"""Suffixes of what is published; the one file without is the licence."""

RUN_ON_ITS_OWN = {"install.py", "prestartup_script.py", "requirements.txt", "uninstall.py"}
"""Files that ComfyUI or its manager would run or install from."""

LIBRARIES = {
    *(
        "bisect",
        "collections",
        "contextlib",
        "contextvars",
        "dataclasses",
        "enum",
        "functools",
        "inspect",
    ),
    *("datetime", "itertools", "json", "logging", "math", "reprlib", "statistics", "struct", "sys"),
    *("threading", "time", "traceback", "types", "typing", "weakref"),
    *("numpy", "torch", "PIL", "triton", "diffusers", "server"),
    *("comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version"),
}
"""What may be imported. Of the standard library, nothing with files, processes or the network."""

ALLOWED = {
    Path("tome_nodes/comfyui/tune/tune_cache.py"): {"folder_paths", "hashlib", "pathlib", "uuid"},
    Path("tome_nodes/ranks.py"): {"distributed"},
}
"""The module that writes files, and the one that asks other ranks of a process group that was made
without us; and what they need for that."""

BUILTINS = {*("eval", "exec", "compile", "__import__", "open", "input", "breakpoint", "globals")}

ATTRIBUTES = {
    *("load", "save", "savez", "savez_compressed", "loadtxt", "savetxt", "genfromtxt", "memmap"),
    *("fromfile", "tofile", "from_file", "open", "hub", "cpp_extension", "load_inline"),
    *("serialization", "package", "multiprocessing", "distributed", "rpc", "ctypeslib", "lib"),
    *("__globals__", "__builtins__", "__subclasses__", "__reduce__"),
}
"""Ways of the libraries, as ``torch.load`` is one, and of objects to the same."""

HARMLESS = {"tl.load"}
"""Kernels load from the memory of the GPU."""

PATTERNS = {
    "text run as code": r"\beval\b|\bFunction\s*\(|\bset(?:Timeout|Interval)\s*\(\s*[\"'`]",
    "a way to the network": r"\bfetch\w*\s*\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon",
    "another origin": r"[\"'`](?:\w+:)?//",
    "markup made of text": r"\b(?:inner|outer)HTML\b|insertAdjacentHTML|document\s*\.\s*write",
    "code loaded later": r"\bimport\s*\(|importScripts|[\"'`]script[\"'`]|\bWorker\b",
    "text that is not plain": r"\batob\b|fromCharCode|unescape\s*\(|\\x[0-9a-fA-F]{2}",
}


def faults_of_python(text, extra=frozenset()):
    """What a Python file must not have; it may use what is ``extra``."""
    forbidden = ATTRIBUTES - extra

    def is_allowed(library):
        if forbidden & {*library.split(".")}:
            return False
        return library.partition(".")[0] in LIBRARIES | extra

    faults = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            faults += [alias.name for alias in node.names if not is_allowed(alias.name)]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            faults += {alias.name for alias in node.names} & forbidden
            faults += [] if is_allowed(node.module) else [node.module]
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            faults.append(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in forbidden:
            faults += [node.attr] if ast.unparse(node) not in HARMLESS else []
        elif isinstance(node, ast.Attribute | ast.Subscript):
            # Which modules there are may be asked, but not what is in them.
            faults += ["sys.modules"] if ast.unparse(node.value) == "sys.modules" else []
    return faults


def faults_of_script(text):
    faults = [name for name, pattern in PATTERNS.items() if re.search(pattern, text)]
    imports = re.findall(r"^\s*(?:import|export)\b.*?[\"'](.+?)[\"']", text, re.MULTILINE)
    return faults + [name for name in imports if not name.startswith(("./", "../"))]


@pytest.mark.parametrize("file", [*PYTHON, *SCRIPTS], ids=str)
def test_published_code_uses_no_files_network_or_eval(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    allowed = ALLOWED.get(file, frozenset())
    assert (faults_of_script(text) if file in SCRIPTS else faults_of_python(text, allowed)) == []
    assert all(len(line) <= 100 for line in text.splitlines())


def test_only_texts_and_pictures_are_published_beside_the_code():
    assert len(PYTHON) > 50 and SCRIPTS
    assert {file.suffix for file in PUBLISHED} == KINDS
    assert [file.name for file in PUBLISHED if not file.suffix] == ["LICENSE"]
    assert not RUN_ON_ITS_OWN & {file.name for file in PUBLISHED}
    drawings = [file.read_text(encoding="utf-8") for file in PUBLISHED if file.suffix == ".svg"]
    # Such a picture can run scripts and bring in others.
    active = re.compile(r"<script|<foreignObject|\bon\w+=|href|@import|url\(", re.IGNORECASE)
    assert drawings and not any(map(active.search, drawings))


@pytest.mark.parametrize(
    "text",
    [
        *("eval('1')", "exec(text)", "run = eval", "open('x', 'w')", "__import__('os')"),
        *("import pickle", "import os.path", "from subprocess import run", "import socket as s"),
        *("import torch\ntorch.load('x')", "from torch import load", "torch.save(x, 'x')"),
        *("import torch.hub", "from torch import hub", "np.load('x', allow_pickle=True)"),
        *("array.tofile('x')", "Image.open('x')", "import numpy.lib"),
        *("type(x).__subclasses__()", "sys.modules['os'].system('x')", "import importlib"),
        *("import pathlib", "import folder_paths", "import fcntl", "path.open('ab')"),
    ],
)
def test_python_with_a_way_out_is_found(text):
    assert faults_of_python(text)


@pytest.mark.parametrize(
    "text",
    [
        *("eval(text)", "new Function('return 1')()", "setTimeout('x()', 1)"),
        *("fetch('/x')", "api.fetchApi('/x')", "new WebSocket(url)", "navigator.sendBeacon(x)"),
        *('const url = "https://example.org"', 'const url = "//example.org"'),
        *("node.innerHTML = text", "document.write(text)", "import('./other.js')"),
        *('import { x } from "https://example.org/x.js";', 'import x from "other";', "atob(text)"),
    ],
)
def test_a_script_with_a_way_out_is_found(text):
    assert faults_of_script(text)


def validated(pack):
    """What the registry's client says of a pack, without a way to the network."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = ["comfy", "--skip-prompt", "node", "validate"]
    done = run_tool(command, pack, pack.parent, no_proxy="", **proxies)
    return done.stdout + done.stderr


def test_the_registry_finds_nothing_wrong_with_the_pack_and_would_find_what_it_forbids(tmp_path):
    pack = tmp_path / "pack"
    copy_pack(pack)
    said = validated(pack)
    assert "All validation checks passed successfully" in said
    assert "warning" not in said.lower() and "error" not in said.lower()
    (pack / "tome_nodes" / "other.py").write_text("eval('1'); exec('2')\n")
    assert {"S307", "S102", "E702"} <= {*re.findall(r"\b[SE]\d{3}\b", validated(pack))}
