"""Tests on real models of ComfyUI, diffusers and latent-diffusion, and on ComfyUI's server."""

import comfyui_in_process  # noqa: F401
import pytest


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
def user_folder(tmp_path):
    """A user folder of its own for each test."""
    import folder_paths

    before = folder_paths.get_user_directory()
    folder_paths.set_user_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_user_directory(before)
