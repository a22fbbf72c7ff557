"""The arithmetic of the benchmark and its methods, without measurements."""

import pytest
import torch
from comfy.patcher_extension import WrappersMP

from benchmarks.speed import figures
from benchmarks.speed.measure import Subject, look
from benchmarks.speed.methods import methods

pytestmark = pytest.mark.newest_only


def test_a_method_is_compared_with_the_unpatched_model_of_the_same_round_and_mode():
    seconds = {
        **{"unpatched": [10.0, 20.0, 10.0], "balanced": [8.0, 16.0, 9.0]},
        **{"unpatched, compiled": [4.0], "fast, compiled": [2.0], "fast, CUDA graphs": [1.0]},
    }
    rows = {name: {"seconds": each, "error": 0.25} for name, each in seconds.items()}
    rows["unpatched"]["gpu_seconds"], rows["balanced"]["gpu_seconds"] = 6.0, 4.0
    comparison = {"case": "sd15, 64x64", "rows": rows}
    assert figures.gains([comparison]) == {
        "sd15_64x64_balanced": pytest.approx(1.25),
        "sd15_64x64_fast_compiled": 2.0,
    }
    assert figures.times_faster(rows, "balanced", "gpu_seconds") == 1.5
    head, _, _, *lines = figures.table(comparison).splitlines()
    cells = [cell.strip() for cell in head.strip("|").split("|")]
    assert cells == [
        *("method", "ms", "quartiles", "times faster", "kernels, ms", "times faster in kernels"),
        "error",
    ]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        *("balanced", "9000.00", "8500.00 to 12500.00", "1.25", "4000.00", "1.50", "0.2500")
    ]


@pytest.fixture(scope="module")
def subject(sd15_of):
    return Subject(sd15_of(1), 32, 128)


@pytest.fixture(scope="module")
def expected(subject):
    (output,) = subject.run(subject.model, torch.no_grad())
    return output


@pytest.mark.parametrize("name", methods("auto", on_gpu=False))
def test_every_method_merges_and_stays_like_the_unpatched_model(name, subject, expected):
    # Here, not before: the presets have the policies of the tests.
    method = methods("auto", on_gpu=False)[name]
    row = look(subject, method(subject.model), expected)
    # One tile is as large as the picture.
    assert (row["error"] > 0) == (name not in ("unpatched", "HyperTile"))
    assert row["error"] < 1 and row["launches"] > 0
    merged, _, blocks = row["merged"].partition("/")
    assert merged == (blocks if name in ("balanced", "fast", "tomesd", "ToDo") else "none")


def test_an_output_that_is_not_finite_is_no_measurement(subject, expected):
    def spoil(executor, *args, **kwargs):
        return executor(*args, **kwargs) * float("nan")

    spoilt = subject.model.clone()
    spoilt.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "spoil", spoil)
    with pytest.raises(ValueError, match="not finite"):
        look(subject, spoilt, expected)
