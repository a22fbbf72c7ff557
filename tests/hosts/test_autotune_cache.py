"""Ways to weigh keys, tried on a real model, and what is kept of it.

There is no GPU here, so a CPU is probed, by a clock that these tests set.
"""

import json
import os
import runpy
import sys
from itertools import product
from multiprocessing import get_context
from types import SimpleNamespace

import folder_paths
import pytest
import torch
from common import FakeClock, relative_error
from host import merging, sample

from tome_nodes.comfyui import attachment, autotune_cache, file_lock
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.comfyui.autotune_cache import FILE, KeptChoices
from tome_nodes.ops.autotune import Autotune, Choice
from tome_nodes.patching import key_weights
from tome_nodes.patching.key_weights import Capabilities, Variant, variant_of, variants_of
from tome_nodes.report.pages import in_words

pytestmark = pytest.mark.usefixtures("user_folder")

CPU = torch.device("cpu")
CASE = ("weights", "attention_pytorch", 4096, "float16")
CHOICE = Choice("channels", "mask", {"mask": 2e-3, "channels": 1e-3})


@pytest.fixture
def probed(monkeypatch):
    """Samples with a probe that finds these times.

    Returns the picture, the run, how many times were taken, and how often channels were.
    """

    def run(model, seconds, **settings):
        clock, timed, taken = FakeClock(), [], []
        widened = key_weights._in_channels

        def in_channels(*arguments, **kwargs):
            clock.time += seconds["channels"] - seconds["mask"]
            taken.append("channels")
            return widened(*arguments, **kwargs)

        def between(start, end):
            timed.append(end - start + seconds["mask"])
            return timed[-1]

        clock.between = between
        probe = Autotune(KeptChoices(), lambda device: clock)
        with monkeypatch.context() as patch:
            patch.setattr(Autotune, "is_for", lambda *_: True)
            patch.setattr(attachment, "autotune", lambda: probe)
            patch.setattr(key_weights, "_in_channels", in_channels)
            patched = attach(model, merging(**settings))
            picture = sample(patched)
        return picture, last_run(patched), len(timed), len(taken)

    return run


CHANNELS = {"mask": 2e-3, "channels": 1e-3}
MASK = {"mask": 1e-3, "channels": 2e-3}


def test_the_fastest_way_is_taken_and_said_and_kept(sd15, probed, caplog):
    expected = sample(attach(sd15, merging()))
    caplog.set_level("INFO", "tome_nodes")
    picture, run, calls, taken = probed(sd15, CHANNELS)
    assert relative_error(picture, expected) < 1e-3
    assert calls and taken > calls // 2
    weights = "weights by channels (1 ms, mask 2 ms)"
    assert f"Tried here: {weights}" in in_words(run)
    (line,) = [each.getMessage() for each in caplog.records if "merged" in each.getMessage()]
    assert line.endswith(f", {weights}")
    entries = json.loads(FILE.path.read_text())["measured"]
    assert [entry["way"] for entry in entries] == ["channels"]
    assert entries[0]["seconds"] == pytest.approx(CHANNELS)
    # In another process with this file, even if the times were others by now.
    again, run, calls, taken = probed(sd15, MASK)
    assert (calls, torch.equal(again, picture)) == (0, True)
    assert taken
    assert f"Tried here: {weights}" in in_words(run)


def test_where_the_default_is_the_fastest_the_log_is_silent(sd15, probed, caplog):
    caplog.set_level("INFO", "tome_nodes")
    picture, run, calls, _ = probed(sd15, MASK)
    assert torch.equal(picture, sample(attach(sd15, merging())))
    assert calls
    assert "Tried here: weights by mask (1 ms, channels 2 ms)" in in_words(run)
    assert not [each for each in caplog.records if "weights by" in each.getMessage()]


def test_each_shape_is_tried_once(sd15_of, probed):
    _, run, _, _ = probed(sd15_of(2), CHANNELS, max_downsample=2)
    assert len(run.choices) == 2
    assert len(json.loads(FILE.path.read_text())["measured"]) == 2


ABLE = Capabilities(flash=True, cudnn=True, kernel=True)
FUNCTIONS = ["attention_basic", "attention_pytorch", "attention_flash", "attention_xformers"]


@pytest.mark.parametrize("able", [Capabilities(), ABLE])
@pytest.mark.parametrize("channels", [40, 64, 128, 512])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_default_is_one_of_the_ways(function, channels, able):
    for permits in product((True, False), repeat=2):
        rest = function, channels, able, *permits
        assert variant_of(*rest) in (variants_of(*rest) or [None])


def test_all_ways_are_tried_where_all_are_there():
    assert variants_of("attention_pytorch", 64, ABLE, True, True) == [*Variant]
    beside_flash = variants_of("attention_flash", 64, ABLE, True, True)
    assert beside_flash == [Variant.CHANNELS, Variant.KERNEL]
    assert variants_of("attention_pytorch", 512, ABLE, False, True) == [Variant.MASK]


def test_what_is_kept_comes_back_for_the_same_machine_case_and_default(monkeypatch):
    KeptChoices().keep(CPU, CASE, CHOICE)
    kept = KeptChoices()
    assert kept.read(CPU, CASE, "mask") == CHOICE
    assert kept.read(CPU, CASE, "channels") is None
    assert kept.read(CPU, (*CASE[:-1], "bfloat16"), "mask") is None
    autotune_cache._machine.cache_clear()
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert kept.read(CPU, CASE, "mask") is None
    autotune_cache._machine.cache_clear()


@pytest.mark.parametrize(
    "change",
    [
        {"way": 7},
        {"seconds": {"mask": -1.0}},
        {"seconds": {"mask": float("nan")}},
        {"seconds": [1.0]},
        {"of": "__import__('os')"},
        {"of": {"case": []}},
        {"seconds": {"mask": 0.1}},
    ],
)
def test_a_broken_file_is_ignored_with_one_warning(change, caplog):
    KeptChoices().keep(CPU, CASE, CHOICE)
    content = json.loads(FILE.path.read_text())
    content["measured"][0] |= change
    text = json.dumps(content)
    FILE.path.write_text(text)
    kept = KeptChoices()
    for case in (CASE, (*CASE, 1)):
        assert kept.read(CPU, case, "mask") is None
        kept.keep(CPU, case, CHOICE)
        assert kept.read(CPU, case, "mask") == CHOICE
    assert FILE.path.read_text() == text
    (record,) = caplog.records
    assert "not as this version writes it" in record.getMessage()


def test_processes_that_write_at_the_same_time_lose_no_entry():
    context = get_context("fork")
    start = context.Barrier(3)

    def write(by):
        start.wait()
        for number in range(40):
            FILE.keep({"by": by, "number": number, "default": "mask"}, CHOICE)

    writers = [context.Process(target=write, args=(by,)) for by in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    kept = [entry["of"] for entry in json.loads(FILE.path.read_text())["measured"]]
    expected = product(range(3), range(40))
    assert sorted((of["by"], of["number"]) for of in kept) == [*expected]


def test_a_folder_where_nothing_can_be_locked_is_written_to(monkeypatch):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(file_lock, "_lock", refuse)
    KeptChoices().keep(CPU, CASE, CHOICE)
    assert KeptChoices().read(CPU, CASE, "mask") == CHOICE


def test_windows_has_a_lock_of_its_own(monkeypatch, tmp_path):
    """With a stand-in for the module that only Windows has."""
    calls = []

    def locking(number, mode, count):
        assert os.fstat(number).st_size == 0
        calls.append((mode, count))

    with monkeypatch.context() as patch:
        windows = SimpleNamespace(LK_LOCK="lock", LK_UNLCK="unlock", locking=locking)
        patch.setitem(sys.modules, "msvcrt", windows)
        patch.setattr(sys, "platform", "win32")
        locked = runpy.run_path(file_lock.__file__)["locked"]
    with pytest.raises(KeyError), locked(tmp_path / "a file.json"):
        assert calls == [("lock", 1)]
        raise KeyError
    assert calls == [("lock", 1), ("unlock", 1)]


def test_a_folder_with_any_name_will_do(user_folder):
    folder_paths.set_user_directory(str(user_folder / "Bücher und 絵 & co"))
    KeptChoices().keep(CPU, CASE, CHOICE)
    assert KeptChoices().read(CPU, CASE, "mask") == CHOICE
