#!/usr/bin/env python3
"""Try, test and check ToMe Nodes. Needs only Python 3.10 or later."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TESTS = ROOT / "tests"
GRACE_SECONDS = 15

# The demo runs models of the tests.
sys.path.append(str(TESTS))

# The whole suite runs in two processes; all tests that need the server share one of them.
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadgroup")

BENCHES = {
    "--deep-cache": "benchmarks.fidelity.deep_cache",
    "--drawn": "benchmarks.fidelity.drawn",
    "--few-steps": "benchmarks.fidelity.few_steps",
    "--fidelity": "benchmarks.fidelity",
    "--forecasts": "benchmarks.forecasts",
    "--picture": "benchmarks.fidelity.off_and_on",
    "--host-time": "benchmarks.speed.host_time",
    "--report": "benchmarks.speed.report",
    "--sound": "benchmarks.forecasts.sound",
    "--terrain": "benchmarks.terrain",
    "--train": "benchmarks.fidelity.training",
    "--work": "benchmarks.work",
}
"""The modules of ``bench``, by the option that chooses them."""

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
    try:
        return arguments.run(arguments, rest)
    except ToolError as error:
        print(f"\nError: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def demo(arguments: argparse.Namespace, _: list[str]) -> int:
    """Run a workflow with ToMe off and on, and compare times and pictures."""
    from tools import demo, environment

    # Report a mistake in the options before minutes of set-up.
    demo.read_graph(arguments)
    python = environment.prepare(arguments.torch)
    if not environment.is_active(python):
        return _call(python, __file__, *sys.argv[1:])
    demo.run(arguments)
    return 0


def test(arguments: argparse.Namespace, pytest_arguments: list[str]) -> int:
    """Run the tests."""
    from tools import browser, environment, lanes

    settings = {}
    if not lanes.chosen_paths(pytest_arguments):
        lane = lanes.lane_of(environment.comfyui_directory())
        pytest_arguments = [*SIDE_BY_SIDE, *pytest_arguments, *lane]
        # One core for each process.
        settings["OMP_NUM_THREADS"] = "1"
    needs_comfyui = lanes.needs_comfyui(pytest_arguments)
    python = (environment.prepare if needs_comfyui else environment.prepare_light)(arguments.torch)
    if lanes.needs_browser(pytest_arguments):
        browser.ensure_browser(python)
        environment.bring_newest_front_end()
    return _call(python, "-m", "pytest", *pytest_arguments, folder=ROOT, settings=settings)


def bench(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Measure what merging costs and saves."""
    from tools import environment
    from tools.errors import ToolError

    modules = [BENCHES[option] for option in rest if option in BENCHES]
    others = [option for option in rest if option not in BENCHES]
    if not modules:
        raise ToolError(f"choose what to measure: {', '.join(BENCHES)}")
    python = environment.prepare(arguments.torch)
    return _call(python, "-m", modules[0], *others, folder=ROOT)


def gpu(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Test or measure on a GPU."""
    from tools import environment

    python = environment.prepare(arguments.torch)
    return _call(python, "-m", "benchmarks.speed", *rest, folder=ROOT)


def check(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run a test that is too long for the suite: ``soak`` or ``compatibility``."""
    from tools import environment

    python = environment.prepare(arguments.torch)
    settings = {"OMP_NUM_THREADS": "1"}
    return _call(python, "-m", arguments.command, *rest, folder=TESTS, settings=settings)


def tool(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run the module of ``tools`` that has the name of its command."""
    return import_module(f"tools.{arguments.command}").main(rest) or 0


def lint(*_: object) -> int:
    """Check the code, its format and its types, and that what is generated is up to date."""
    from tools import environment, generate

    python = environment.prepare_light()
    checks = (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"])
    codes = [_call(python, "-m", *check, folder=ROOT) for check in checks]
    return max(*codes, generate.main(["--check"]))


def _one_of(versions: Collection[str], otherwise: str = "") -> Callable[[str], str]:
    def version(text: str) -> str:
        if text not in versions:
            allowed = ", ".join(versions)
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {allowed}{otherwise}")
        return text

    return version


def _parser() -> argparse.ArgumentParser:
    from tools.demo import add_arguments
    from tools.environment import NEWEST, NEWEST_TORCH, RELEASES, TORCHES

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="dev.py", description=__doc__, epilog=EPILOG, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., int], summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=EPILOG,
            formatter_class=raw,
            # The start of an option may be one of pytest's, such as --co.
            allow_abbrev=False,
        )
        command.set_defaults(run=run)
        if name not in ("generate", "lint", "publish"):
            command.add_argument(
                "--comfyui",
                type=_one_of(
                    RELEASES, "; for any other, set COMFYUI_PATH to the folder of a ComfyUI"
                ),
                metavar="VERSION",
                help=f"the ComfyUI to run on: {', '.join(RELEASES)} (default: COMFYUI_PATH, else "
                f"{NEWEST})",
            )
            command.add_argument(
                "--torch",
                type=_one_of(TORCHES),
                default=NEWEST_TORCH,
                metavar="VERSION",
                help=f"the PyTorch to run on: {', '.join(TORCHES)} (default: {NEWEST_TORCH})",
            )
        return command

    add_arguments(
        add(
            "demo",
            demo,
            "run a workflow on a real ComfyUI with ToMe off and on, and compare the two",
        )
    )
    add(
        "test",
        test,
        "run all tests, or some, such as tests/unit, with all arguments of pytest; on an earlier "
        "ComfyUI, the tests that depend on it",
    )
    add(
        "bench",
        bench,
        "measure what the first option names (in brackets: further arguments): "
        "--fidelity, how much each setting changes the picture, and its work (--quick, --only, "
        "--steps, --names); "
        "--forecasts, whether forecasts change the result more than fewer steps (--quick, --only); "
        "--sound, the same for each stream of a video with sound (--scheduler, --denoise, "
        "--together); "
        "--picture, pictures with ToMe off and on (--model, --repeats); "
        "--host-time, what merging adds before any kernel runs (--quick); "
        "--train, no measurement, but a UNet for --fidelity (stickers or stickers_sd15, --minutes, "
        "--rate); "
        "--drawn, shallow steps of such a UNet in random cells (stickers or stickers_sd15, "
        "--cells, --seed); "
        "--deep-cache, shallow steps against DeepCache in diffusers (--samplers, --steps); "
        "--few-steps, forecasts in few steps on other scenes (--only); "
        "--terrain, skipped steps on a UNet that others trained (euler or dpmpp_2m); "
        "--work, how much work is left, counted; "
        "--report, tables of what was measured on a GPU",
    )
    add(
        "gpu",
        gpu,
        "with 1 to 4, test or measure on a GPU within nine minutes, see benchmarks/GPU.md; more "
        "arguments: --dry, --minutes, --out",
    )
    add(
        "soak",
        check,
        "do many random runs in one process, and check that none fails or leaves anything behind; "
        "more arguments: --runs, --quick, --seed, --only",
    )
    add(
        "compatibility",
        check,
        "run beside each of some fifty other nodes, and write a table of the results",
    )
    add(
        "generate",
        tool,
        "write the English locale, the lists of the help pages and the tables of figures from the "
        "options and the results; with --check, only say what is out of date; with --translated "
        "and languages, record that these translate the present English texts",
    )
    add("publish", tool, "with --check, say what is still open before the pack can be published")
    add(
        "lint",
        lint,
        "check the code and its format with ruff, its types with mypy, and generated texts",
    )
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
