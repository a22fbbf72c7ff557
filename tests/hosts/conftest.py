"""Tests on real models of ComfyUI, diffusers and latent-diffusion, and on ComfyUI's server."""

from dataclasses import replace
from functools import cache

import comfyui_in_process  # noqa: F401
import pytest
import torch.nn.functional as F

from tome_nodes.settings.presets import PRESETS


@pytest.fixture(scope="module", autouse=True)
def small_maps_are_worth_merging():
    """Tiny models are fed maps of few tokens, and merge them whatever that saves."""
    with pytest.MonkeyPatch.context() as patch:
        _change(patch, PRESETS, least_tokens=256, least_saved=0.0)
        yield


@pytest.fixture
def change_policy(monkeypatch):
    """Changes the policies of some presets, or of all, for a test."""
    return lambda *names, **changes: _change(monkeypatch, names or PRESETS, **changes)


def _change(patch, names, **changes):
    for name in names:
        preset = PRESETS[name]
        policy = replace(preset.policy, **changes)
        patch.setitem(PRESETS, name, replace(preset, policy=policy))


@pytest.fixture(autouse=True)
def clones_that_are_gone_count_as_unloaded():
    """Tests share models. ComfyUI collects all garbage before each run while one has no clone left.

    Beside a compiler's garbage, that takes longer than the runs.
    """
    yield
    from comfy.model_management import current_loaded_models

    current_loaded_models[:] = [loaded for loaded in current_loaded_models if not loaded.is_dead()]


@pytest.fixture(scope="session")
def models():
    """Tiny models by kind, each built once."""
    import comfy.supported_models
    from host import needs
    from models.comfyui import KINDS, build

    made = {}

    def model(kind):
        name = KINDS[kind].name
        needs(name, hasattr(comfy.supported_models, name))
        if kind not in made:
            made[kind] = build(KINDS[kind])
        return made[kind]

    return model


@pytest.fixture
def host(request, models):
    """The model of a host that a test of the contract runs for."""
    from under_test import make

    return make(request.param, models)


@pytest.fixture(scope="session")
def sd15_of():
    """Tiny UNets like that of Stable Diffusion 1.x by the number of its levels, each built once."""
    from models.comfyui import build, sd15

    return cache(lambda levels: build(sd15(levels)))


@pytest.fixture
def sd15(sd15_of):
    return sd15_of(1)


@pytest.fixture
def sd15_from_file(tmp_path):
    """A UNet as the host's loader makes it, whose prompts have 768 channels."""
    import comfy.sd
    from models.checkpoints import write_checkpoint

    path = write_checkpoint(tmp_path / "sd15.ckpt", "sd15", levels=1, unet_only=True)
    return comfy.sd.load_diffusion_model(str(path))


@pytest.fixture
def shallow(models):
    return models("one_level")


@pytest.fixture
def user_folder(tmp_path):
    import folder_paths

    before = folder_paths.get_user_directory()
    folder_paths.set_user_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_user_directory(before)


@pytest.fixture
def calls(monkeypatch):
    """The queries, keys and masks of all calls of attention, in the order of the calls."""
    seen = []
    attend = F.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, *args, **kwargs):
        seen.append((query, key, attn_mask))
        return attend(query, key, value, attn_mask, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen
