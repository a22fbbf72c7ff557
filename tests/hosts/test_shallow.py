"""The trial of shallow steps: with its own deep features, a shallow evaluation is the whole one."""

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from common import relative_error
from compatibility import table
from compatibility.neighbours import BY_NAME
from compatibility.table import alone, model_of
from host import fast, overridden
from models.comfyui import UNETS, sample

from benchmarks.fidelity.shallow import Call, Shallow, whole_evaluations
from tome_nodes.comfyui.attachment import attach

pytestmark = pytest.mark.newest_only

SIZE = 32, 32


def checked(model, cut):
    """The model, whose evaluations are whole and then shallow; and how much these two differ."""
    gaps = []

    def evaluate(executor, x, t, context, y, control, options, **others):
        def run(given):
            copied = control and {name: [*added] for name, added in control.items()}
            call = Call(executor.class_obj, cut, options, given)
            with call.installed():
                own = call.control(copied)
                return call, executor(x, t, context, y, own, call.options, **others)

        whole, answer = run(None)
        shallow, again = run(whole.came)
        assert shallow.came is None
        gaps.append(relative_error(again, answer))
        return answer

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "checked", evaluate)
    return clone, gaps


@pytest.mark.parametrize(
    ("kind", "cut"), [("sd15", 0), ("sdxl", 0), ("sdxl", 1), ("sdxl_refiner", 1), ("sd2", 0)]
)
@pytest.mark.parametrize("merges", [True, False])
def test_with_its_own_deep_features_a_shallow_evaluation_is_the_whole_one(
    models, kind, cut, merges
):
    model = models(kind)
    patched, gaps = checked(attach(model, fast(forecast=False)) if merges else model, cut)
    result = sample(patched, UNETS[kind], SIZE, steps=2)
    assert gaps == [0.0, 0.0]
    if not merges:
        assert torch.equal(result, sample(model, UNETS[kind], SIZE, steps=2))
    assert overridden(model) == []


@pytest.mark.parametrize(
    "name",
    [
        *("FreeU_V2", "PatchModelAddDownscale", "ControlNetApplyAdvanced", "IPAdapter"),
        *("ConditioningSetArea", "ContextWindowsManual", "PerturbedAttentionGuidance"),
    ],
)
def test_that_holds_beside_other_nodes(name):
    """What they do to the deep blocks is in the features, and to the outer ones it is done once."""
    neighbour = BY_NAME[name]
    assert isinstance(alone("sd15", neighbour), torch.Tensor)
    patched, gaps = checked(neighbour.patch(model_of("sd15"), "sd15"), 0)
    table.run(neighbour, patched, "sd15")
    assert gaps and max(gaps) < 1e-6
    # Each of several calls with one condition has features of its own.
    shallow = Shallow(plan=lambda count: range(2))
    table.run(neighbour, shallow.patch(neighbour.patch(model_of("sd15"), "sd15")), "sd15")
    assert shallow.shallow == shallow.whole > 0


def test_the_planned_steps_are_shallow(sd15):
    ran = []
    hook = (
        sd15.model.diffusion_model.middle_block[0]
        .in_layers[-1]
        .register_forward_hook(lambda *_: ran.append(1))
    )
    shallow = Shallow()
    result = sample(shallow.patch(sd15), UNETS["sd15"], SIZE, steps=20)
    hook.remove()
    assert (shallow.whole, shallow.shallow, len(ran)) == (2 * 8, 2 * 12, 8)
    assert 0 < relative_error(result, sample(sd15, UNETS["sd15"], SIZE, steps=20)) < 0.5
    assert overridden(sd15) == []


@pytest.mark.parametrize(
    ("count", "whole"),
    [
        (4, [0, 1, 2, 3]),
        (8, [0, 1, 2, 4, 6]),
        (12, [0, 1, 2, 4, 6, 9]),
        (20, [0, 1, 2, 3, 4, 6, 10, 14]),
        (21, [0, 1, 2, 3, 4, 6, 10, 15]),
        (40, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 19, 28]),
    ],
)
def test_whole_steps_are_dense_at_first(count, whole):
    assert sorted(whole_evaluations(count)) == whole
