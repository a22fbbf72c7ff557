#!/usr/bin/env python3
"""Try, test and check ToMe Nodes. Needs only Python 3.10 or later."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TESTS = ROOT / "tests"
GRACE_SECONDS = 15

# The tiny models of the tests are those of the demo, too.
sys.path.append(str(TESTS))

# The whole suite runs in two processes; all tests that need the server share one of them.
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadgroup")

EPILOG = """\
The first demo, test, bench, gpu, soak or compatibility makes .venv, with pinned packages and a real
ComfyUI; this takes a few minutes and 6 GB. With --comfyui VERSION they use an earlier ComfyUI that
is pinned; set COMFYUI_PATH to the folder of your own to use that instead. With --torch VERSION they
use an older PyTorch, in a folder of its own below .venv. The commands "lint" and "test tests/unit"
need only PyTorch, and fetch no ComfyUI and no browser. To undo everything, delete .venv and demo.
"""


def main() -> int:
    """Run the command line and return its exit code."""
    # An older Python gets this far, and should get a message instead of a traceback.
    if sys.version_info < (3, 10):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"This is Python {version}; it has to be 3.10 or later.", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    from tools import environment
    from tools.errors import ToolError

    parser = _parser()
    arguments, rest = parser.parse_known_args()
    if rest and arguments.command in ("demo", "lint"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if version := getattr(arguments, "comfyui", None):
        os.environ["COMFYUI_PATH"] = str(environment.pinned_comfyui(version))
    torch = getattr(arguments, "torch", environment.NEWEST_TORCH)
    try:
        if arguments.command == "demo":
            return demo(arguments)
        if arguments.command == "bench":
            return bench(torch, rest)
        if arguments.command == "gpu":
            return gpu(torch, rest)
        if arguments.command in ("soak", "compatibility"):
            return check(torch, arguments.command, rest)
        if arguments.command == "generate":
            from tools import generate

            generate.main(rest)
            return 0
        if arguments.command == "publish":
            from tools import publish

            publish.main(rest)
            return 0
        return test(torch, rest) if arguments.command == "test" else lint()
    except ToolError as error:
        print(f"\nError: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def demo(arguments: argparse.Namespace) -> int:
    """Run a workflow with ToMe off and on, and compare times and images."""
    from tools import demo, environment

    # Report a mistake in the options before minutes of set-up.
    demo.read_graph(arguments)
    python = environment.prepare(arguments.torch)
    if not environment.is_active(python):
        return _call(python, __file__, *sys.argv[1:])
    demo.run(arguments)
    return 0


def test(torch: str, pytest_arguments: list[str]) -> int:
    """Run the tests."""
    from tools import browser, environment, lanes

    settings = {}
    if not lanes.chosen_paths(pytest_arguments):
        lane = lanes.lane_of(environment.comfyui_directory())
        pytest_arguments = [*SIDE_BY_SIDE, *pytest_arguments, *lane]
        # One core for each process.
        settings["OMP_NUM_THREADS"] = "1"
    needs_comfyui = lanes.needs_comfyui(pytest_arguments)
    python = (environment.prepare if needs_comfyui else environment.prepare_light)(torch)
    if lanes.needs_browser(pytest_arguments):
        browser.ensure_browser(python)
        environment.bring_newest_front_end()
    return _call(python, "-m", "pytest", *pytest_arguments, folder=ROOT, settings=settings)


def bench(torch: str, arguments: list[str]) -> int:
    """Measure what merging costs and saves."""
    from tools import environment

    parser = argparse.ArgumentParser(prog="dev.py bench", add_help=False, allow_abbrev=False)
    others = {
        "fidelity": "benchmarks.fidelity",
        "forecasts": "benchmarks.forecasts",
        "picture": "benchmarks.fidelity.off_and_on",
        "host-time": "benchmarks.speed.host_time",
        "report": "benchmarks.speed.report",
        "train": "benchmarks.fidelity.trial",
        "work": "benchmarks.work",
    }
    for name in others:
        parser.add_argument(f"--{name}", action="store_true")
    chosen, rest = parser.parse_known_args(arguments)
    asked = [others[name] for name in others if getattr(chosen, name.replace("-", "_"))]
    module = [*asked, "benchmarks.speed"][0]
    return _call(environment.prepare(torch), "-m", module, *rest, folder=ROOT)


def gpu(torch: str, arguments: list[str]) -> int:
    """Test or measure on a GPU, or pack what a machine without a network needs for that."""
    from tools import carried, environment

    parser = argparse.ArgumentParser(prog="dev.py gpu", add_help=False, allow_abbrev=False)
    parser.add_argument("--carried", type=Path)
    if arguments[:1] == ["pack"]:
        parser.add_argument("--has", nargs="+", default=[])
        chosen = parser.parse_args(arguments[1:])
        environment.prepare()
        carried.pack(chosen.carried or ROOT / "carried", torch, chosen.has)
        return 0
    chosen, rest = parser.parse_known_args(arguments)
    command = ("-m", "benchmarks.speed.gpu", *rest)
    if chosen.carried is None:
        return _call(environment.prepare(torch), *command, folder=ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        settings = carried.unpack(chosen.carried.resolve(), Path(scratch))
        os.environ.update(settings)
        return _call(sys.executable, *command, folder=ROOT)


def check(torch: str, name: str, arguments: list[str]) -> int:
    """Run a test that is too long for the suite: ``soak`` or ``compatibility``."""
    from tools import environment

    python = environment.prepare(torch)
    settings = {"OMP_NUM_THREADS": "1"}
    return _call(python, "-m", name, *arguments, folder=TESTS, settings=settings)


def lint() -> int:
    """Check the code, its format and its types."""
    from tools import environment

    python = environment.prepare_light()
    checks = (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"])
    codes = [_call(python, "-m", *check, folder=ROOT) for check in checks]
    return max(codes)


def _version(text: str) -> str:
    from tools.environment import RELEASES

    if text not in RELEASES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(RELEASES)}; for any other, set COMFYUI_PATH to the "
            "folder of a ComfyUI"
        )
    return text


def _torch(text: str) -> str:
    from tools.environment import TORCHES

    if text not in TORCHES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(TORCHES)}")
    return text


def _parser() -> argparse.ArgumentParser:
    from tools.demo import add_arguments
    from tools.environment import NEWEST, NEWEST_TORCH, RELEASES, TORCHES

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="dev.py", description=__doc__, epilog=EPILOG, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=EPILOG,
            formatter_class=raw,
            # The start of an option may be one of pytest's, such as --co.
            allow_abbrev=False,
        )
        if name not in ("generate", "lint", "publish"):
            command.add_argument(
                "--comfyui",
                type=_version,
                metavar="VERSION",
                help=f"the ComfyUI to run on: {', '.join(RELEASES)} (default: COMFYUI_PATH, else "
                f"{NEWEST})",
            )
            command.add_argument(
                "--torch",
                type=_torch,
                default=NEWEST_TORCH,
                metavar="VERSION",
                help=f"the PyTorch to run on: {', '.join(TORCHES)} (default: {NEWEST_TORCH})",
            )
        return command

    add_arguments(
        add("demo", "run a workflow on a real ComfyUI with ToMe off and on, and compare the two")
    )
    add(
        "test",
        "run all tests, or those that more arguments select, such as tests/unit; on an earlier "
        "ComfyUI, the tests that depend on it",
    )
    add(
        "bench",
        "measure all methods against the unpatched model; more arguments: --transformers, "
        "--quick, --model, --size, --minutes, --name; with --fidelity, how much everything that a "
        "user could pick changes, and what it takes: --quick, --only, --steps, --names, --seeds; "
        "with --forecasts, whether forecasts change more than fewer steps: --quick, --only; "
        "with --picture, the picture of off and on: --model, --repeats; with "
        "--host-time, what merging adds before any kernel runs: --quick; with --train, train a "
        "UNet that --fidelity can ask: sdxl or sd15, --minutes, --rate, --full-share; with --work, "
        "how much work is left, counted; with --report, tables of what was measured on a GPU",
    )
    add(
        "gpu",
        "with 1 to 4, test or measure on a GPU within nine minutes, see benchmarks/GPU.md; more "
        "arguments: --dry, --minutes, --out, --carried; with pack, fill a folder for a machine "
        "without a network: --carried, --has",
    )
    add(
        "soak",
        "do many random runs in one process, and see whether any fails or leaves anything behind; "
        "more arguments: --runs, --quick, --seed, --only",
    )
    add(
        "compatibility",
        "run beside each of some fifty other nodes, and write the table of what comes of it",
    )
    add(
        "generate",
        "write the English locale and the lists of the help pages from the options; with "
        "--translated and languages, note that their texts are of the present English ones",
    )
    add("publish", "with --check, say what is still open before the pack can be published")
    add("lint", "check the code and its format with ruff, and its types with mypy")
    return parser


def _call(
    *command: str | Path,
    folder: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> int:
    """Run a command and return its exit code; it does not outlive this process."""
    from tools.environment import CALM_THREADS

    environment = {**CALM_THREADS, "PYTHONUTF8": "1", **(settings or {}), **os.environ}
    process = subprocess.Popen([str(part) for part in command], cwd=folder, env=environment)
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        # In a terminal the command got the same Ctrl-C, and is cleaning up.
        _wait(process)
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            _wait(process)
        if process.poll() is None:
            process.kill()


def _wait(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(GRACE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
