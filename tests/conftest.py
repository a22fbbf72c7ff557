"""Fixtures of all tests; ComfyUI is imported only when a test asks for it."""

import logging
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tools.environment import NEWEST, is_earlier, newest_front_end

# Without a GPU, the kernels run in Triton's interpreter, which must be chosen before they load.
ON_GPU = torch.cuda.is_available()
# The backend.
ONLY_ON_A_GPU = re.compile(r", triton(?=,|;|$)")
GAIN = re.compile(r"; (?:saved|no gain|expected)\b.*")
if ON_GPU:
    # Sums in full precision, in the same order each time.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
else:
    os.environ["TRITON_INTERPRET"] = "1"

# The duration of an example depends on the machine.
settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")


def pytest_addoption(parser):
    parser.addoption(
        "--pictures",
        action="store_true",
        help="have the editor's tests save the pictures that the help pages and the README show",
    )


@pytest.fixture
def log_messages(caplog, request):
    """The pack's log messages so far, without gains, in most tests without what a GPU adds."""
    caplog.set_level(logging.INFO, logger="tome_nodes")
    is_whole = not ON_GPU or "kernels" in request.path.name

    def messages():
        texts = [record.getMessage() for record in caplog.records if record.name == "tome_nodes"]
        texts = [GAIN.sub("", text) for text in texts]
        return texts if is_whole else [ONLY_ON_A_GPU.sub("", text) for text in texts]

    return messages


@pytest.fixture(autouse=True)
def nothing_gives_way(caplog, request):
    """No kernel fails, except where that is what is tested."""
    yield
    if "gives_way" not in request.node.name:
        # Those of now are of the teardown only.
        logged = [record.getMessage() for record in caplog.get_records("call")]
        assert not [message for message in logged if "takes the place" in message]


@pytest.fixture
def untried():
    """What merging runs on is tried anew, in this test and after it."""
    from tome_nodes.merging import engine

    engine.missing_operation.cache_clear()
    yield
    engine.missing_operation.cache_clear()


@pytest.fixture
def fresh_compiler():
    """A compiler that has compiled nothing, in this test and after it."""
    if torch.__version__ < "2.11":
        pytest.skip("whole graphs of patched models need PyTorch 2.11")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextmanager
def serving(base, *arguments):
    """A running server with this pack, small checkpoints, and the names of workflows' models."""
    from models.checkpoints import write_checkpoint

    from tools.editor import offer_files
    from tools.server import ComfyServer

    write_checkpoint(base / "models/checkpoints/sd15.ckpt", "sd15", levels=1, residuals=1)
    write_checkpoint(base / "models/checkpoints/sdxl.ckpt", "sdxl")
    (base / "custom_nodes").mkdir()
    shutil.copy(Path(__file__).with_name("models") / "lying_sampler.py", base / "custom_nodes")
    with ComfyServer(base, arguments=arguments) as running:
        offer_files(running)
        yield running


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    from tools.demo import NODES, search

    base = tmp_path_factory.mktemp("server")
    with serving(base, *search({"custom_nodes": NODES}, base)) as running:
        yield running


@pytest.fixture(scope="session")
def newest_server(tmp_path_factory):
    option = f"--front-end-root={newest_front_end()}"
    with serving(tmp_path_factory.mktemp("newest_server"), option) as running:
        yield running


@pytest.fixture(scope="session")
def info(server):
    return server.get("/object_info")


def pytest_runtest_setup(item):
    if item.get_closest_marker("newest_only"):
        from comfyui_version import __version__

        if is_earlier(__version__, NEWEST):
            pytest.skip(f"the same on ComfyUI {__version__} and {NEWEST}")


def pytest_itemcollected(item):
    """Where tests run side by side, all that need a server share one."""
    if item.get_closest_marker("xdist_group"):
        return
    if not {"server", "front_end"}.isdisjoint(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.xdist_group("server"))
