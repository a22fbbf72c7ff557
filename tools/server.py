"""A real ComfyUI server with this pack installed, as a context manager.

    with ComfyServer(base_directory) as server:
        history = server.run(prompt)
        png = server.images(history)[0]

It runs in its own process; nothing of ComfyUI is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import websocket

from tools.environment import CALM_THREADS, comfyui_directory
from tools.errors import ToolError
from tools.pack import copy_pack

HOST = "127.0.0.1"
TETHER = Path(__file__).with_name("tether.py")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
LOG_TAIL_LINES = 40
TEXT_ON_NODE = 3
START_SECONDS, STOP_SECONDS = 300, 10
MOST_SILENCE_SECONDS = 900

# By default, ComfyUI uses a slower attention on a CPU than on a GPU, which would flatter merging.
CPU_ARGUMENTS = ("--cpu", "--use-pytorch-cross-attention")

Event = dict[str, Any]
"""A message of the server: its `type`, and its `data`."""


class ServerError(ToolError):
    """The server did not start, died, or gave an unexpected answer."""


class PromptRejected(ServerError):
    """The server refused a prompt before running it: HTTP 400.

    `node_errors` is the part of the answer that says, for each node, what is wrong with it.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        self.node_errors: dict[str, Any] = answer.get("node_errors") or {}
        super().__init__(_readable(answer))


class ExecutionFailed(ServerError):
    """A prompt was accepted, but one of its nodes raised or it was interrupted."""


class ComfyServer:
    """A headless server on a free loopback port, with `base` as its only folder for data.

    `base/models`, `base/input` and `base/output` are as in any ComfyUI folder; the pack is copied
    to `base/custom_nodes/tome-nodes` as it would be published. Nothing is written outside `base`.
    `arguments` are additional command line arguments for ComfyUI.

    The server ends with the `with` block, and with this process however it ends.
    """

    def __init__(
        self, base: str | os.PathLike[str], *, device: str = "cpu", arguments: Sequence[str] = ()
    ) -> None:
        self.base = Path(base).resolve()
        self.log_file = self.base / "server.log"
        self.port = 0
        self._arguments = [*(CPU_ARGUMENTS if device == "cpu" else ()), *arguments]
        self._client = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._tether: socket.socket | None = None
        # Proxies are for other machines.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The address of the server and its front end, without a slash at the end."""
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> str:
        """The output of the server so far, without colours."""
        return COLOUR.sub("", self.log_file.read_text(encoding="utf-8", errors="replace"))

    def start(self) -> None:
        """Start the server, and return once it answers."""
        comfyui = comfyui_directory()
        for folder in ("models/checkpoints", "custom_nodes", "input", "output", "temp", "user"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        copy_pack(self.base / "custom_nodes" / "tome-nodes")
        self._tether = socket.create_server((HOST, 0))
        self.port = _free_port()
        command = [
            *(sys.executable, TETHER, self._tether.getsockname()[1], comfyui / "main.py"),
            *(f"--listen={HOST}", f"--port={self.port}", f"--base-directory={self.base}"),
            *("--database-url=sqlite:///:memory:", "--disable-auto-launch", "--disable-api-nodes"),
            *self._arguments,
        ]
        try:
            with self.log_file.open("wb") as log:
                process = self._process = subprocess.Popen(
                    [str(part) for part in command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**CALM_THREADS, **os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"},
                    **_new_group(),
                )
            self._wait_until_it_answers(process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and every process it started; does nothing if it is not running."""
        process, self._process = self._process, None
        if process is not None:
            _end_group(process)
        if self._tether is not None:
            self._tether.close()
            self._tether = None

    def get(self, path: str) -> Any:
        """Return the JSON answer to a GET request, such as `server.get("/system_stats")`."""
        return json.loads(self._request(path))

    def post(self, path: str, content: Any) -> Any:
        """Return the JSON answer to a POST request with `content` as JSON; None if it is empty."""
        answer = self._request(path, json.dumps(content).encode())
        return json.loads(answer) if answer else None

    def queue(self, prompt: dict[str, Any]) -> str:
        """Queue a graph in the API format and return its prompt id.

        Raises `PromptRejected` if the server finds it invalid.
        """
        return self.post("/prompt", {"prompt": prompt, "client_id": self._client})["prompt_id"]

    def run(
        self, prompt: dict[str, Any], on_event: Callable[[Event], None] | None = None
    ) -> dict[str, Any]:
        """Run a graph in the API format to its end and return its entry in the history.

        The entry has one more key, `seconds`: the time of each node that was executed, by its id,
        in the order of execution. `on_event` is called with each event of this run as it comes,
        such as `{"type": "progress", "data": {"node": "3", "value": 1, "max": 20, ...}}`; a text to
        show on a node comes as `{"type": "progress_text", "data": {"node": "3", "text": "..."}}`.

        Raises `PromptRejected` if the server finds the graph invalid, `ExecutionFailed` if a node
        raises or the run is interrupted, and `ServerError` if the server dies or says nothing for
        long.
        """
        address = f"ws://{HOST}:{self.port}/ws?clientId={self._client}"
        connection = websocket.WebSocket()
        try:
            connection.connect(address, timeout=MOST_SILENCE_SECONDS, http_no_proxy=[HOST])
            prompt_id = self.queue(prompt)
            seconds = self._follow(connection, prompt_id, on_event or (lambda event: None))
        except websocket.WebSocketTimeoutException as timeout:
            raise self._error(f"said nothing for {MOST_SILENCE_SECONDS} s") from timeout
        except (websocket.WebSocketConnectionClosedException, ConnectionError) as closed:
            raise self._error("died during a run") from closed
        finally:
            connection.close()
        return {**self.get(f"/history/{prompt_id}")[prompt_id], "seconds": seconds}

    def images(self, history: dict[str, Any]) -> list[bytes]:
        """Return the image files that a run saved, in the order of its history entry."""
        return [
            self.view(image)
            for output in history["outputs"].values()
            for image in output.get("images", ())
            if image["type"] == "output"
        ]

    def view(self, image: dict[str, str]) -> bytes:
        """Return an image file by its entry in the history."""
        return self._request(f"/view?{urllib.parse.urlencode(image)}")

    def _follow(
        self, connection: websocket.WebSocket, prompt_id: str, on_event: Callable[[Event], None]
    ) -> dict[str, float]:
        seconds: dict[str, float] = {}
        node, since = None, 0.0
        while True:
            message = connection.recv()
            if isinstance(message, bytes):
                if event := _text_on_node(message):
                    on_event(event)
                continue
            now = time.perf_counter()
            if not message:
                raise websocket.WebSocketConnectionClosedException()
            event = json.loads(message)
            data = event.get("data") or {}
            if data.get("prompt_id") != prompt_id:
                continue
            if event["type"] == "executing":
                if node is not None:
                    seconds[node] = seconds.get(node, 0.0) + now - since
                node, since = data["node"], now
            on_event(event)
            if event["type"] == "executing" and node is None:
                return seconds
            if event["type"] in ("execution_error", "execution_interrupted"):
                raise ExecutionFailed(_failure(event))

    def _request(self, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with self._http.open(request) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            if error.code == 400 and path == "/prompt":
                raise PromptRejected(json.loads(answer)) from None
            raise ServerError(f"{path} was answered with HTTP {error.code}: {answer}") from None
        except urllib.error.URLError as error:
            raise self._error(f"did not answer {path}: {error.reason}") from error

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._http.open(f"{self.url}/system_stats", timeout=10).close()
                return
            if (status := process.poll()) is not None:
                raise self._error(f"ended with exit code {status} while starting")
            time.sleep(0.1)
        raise self._error(f"did not answer within {START_SECONDS} s")

    def _error(self, what: str) -> ServerError:
        """What the server did wrong, with the end of its log."""
        lines = self.log.splitlines()[-LOG_TAIL_LINES:]
        said = [f"The server {what}. The end of {self.log_file}:", *lines]
        return ServerError("\n".join(said))


def _text_on_node(message: bytes) -> Event | None:
    """The event of a text to show on a node; None for other binary messages."""
    kind, length = struct.unpack_from(">II", message)
    if kind != TEXT_ON_NODE:
        return None
    node, text = message[8 : 8 + length], message[8 + length :]
    return {"type": "progress_text", "data": {"node": node.decode(), "text": text.decode()}}


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


def _new_group() -> dict[str, Any]:
    """Arguments of Popen that shield the server from Ctrl-C, and let it end with its children."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    if os.name == "nt":
        command = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
        process.wait()
        return
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(STOP_SECONDS)
    finally:
        # What the server started may outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _readable(answer: dict[str, Any]) -> str:
    """The sentences of a 400 answer: one for the prompt and one for each error of each node."""
    lines = [_sentence(answer.get("error") or {})]
    for node, report in (answer.get("node_errors") or {}).items():
        name = f"node {node} ({report.get('class_type', 'unknown class')})"
        lines += [f"{name}: {_sentence(error)}" for error in report.get("errors", ())]
    return "\n".join(lines)


def _sentence(error: dict[str, Any]) -> str:
    message, details = error.get("message") or "", error.get("details") or ""
    return f"{message}: {details}" if details else message


def _failure(event: Event) -> str:
    data = event["data"]
    where = f"node {data.get('node_id')} ({data.get('node_type')})"
    if event["type"] == "execution_interrupted":
        return f"The run was interrupted at {where}."
    trace = "".join(data.get("traceback") or ())
    return f"{where}: {data.get('exception_type')}: {data.get('exception_message')}\n{trace}"
