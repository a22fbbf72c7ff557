"""What other nodes see of a model that runs as a whole on merged tokens."""

import math

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from common import Shuffle, relative_error
from models.comfyui import TINY, sample

from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

FAST = ToMeConfig(**settings_of("fast", {"ratio": 0.5}) | {"min_tokens": 1, "forecast": False})


def watched(model, seen, change=lambda x: x):
    """The model with a wrapper around its network that notes what enters and leaves it."""

    def wrapper(executor, x, *args, **kwargs):
        x = change(x)
        # With sound, the video is the first of two.
        entered = (x[0] if isinstance(x, list) else x).clone()
        out = executor(x, *args, **kwargs)
        seen.append((entered, out[0] if isinstance(out, list) else out))
        return out

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "theirs", wrapper)
    return clone


def video_of(latent, packed):
    """The video in a latent that the host packs together with sound, if it does."""
    if packed is None:
        return latent
    shape = packed[0][1:]
    return latent[..., : math.prod(shape)].reshape(len(latent), *shape)


def noted(model, evaluated):
    """The model with a wrapper that notes its evaluations: noisy latent, level, denoised latent."""

    def wrapper(executor, x, t, *args, **kwargs):
        noisy = x.clone()
        denoised = executor(x, t, *args, **kwargs)
        packed = kwargs.get("latent_shapes")
        evaluated.append((video_of(noisy, packed), t, video_of(denoised, packed)))
        return denoised

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "noting", wrapper)
    return clone


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("kind", ["flux", "wan21", "qwen_image", "wan21_i2v", "ltxav"])
def test_a_wrapper_of_the_network_sees_the_latent_and_the_answer_for_it(
    models, log_messages, kind, ours_first
):
    tiny, model = TINY[kind], models(kind)
    seen, evaluated = [], []
    plain = noted(model, evaluated)
    both = watched(attach(plain, FAST), seen) if ours_first else attach(watched(plain, seen), FAST)
    result = sample(both, tiny, tiny.size(8, 10), steps=6)
    assert len(seen) == len(evaluated) == 6
    for (entered, out), (noisy, t, denoised) in zip(seen, evaluated, strict=True):
        assert torch.equal(entered[:, : noisy.shape[1]], noisy)
        sigma = t.view(-1, *[1] * (noisy.ndim - 1))
        assert relative_error(noisy - sigma * out, denoised) < 1e-5
    assert log_messages()[-1].startswith("[ToMe] merged ")
    assert (
        relative_error(sample(attach(model, FAST), tiny, tiny.size(8, 10), steps=6), result) < 1e-4
    )


def test_what_a_wrapper_changes_is_what_merges(models):
    tiny, model = TINY["flux"], models("flux")
    theirs = watched(model, [], lambda x: 0.5 * x.flip(-1))
    expected = sample(theirs, tiny, tiny.size(8, 10), steps=6)
    both = attach(theirs, FAST, Shuffle)
    assert relative_error(sample(both, tiny, tiny.size(8, 10), steps=6), expected) < 1e-4


def test_a_wrapper_may_evaluate_parts_of_the_latent(models):
    tiny, model = TINY["flux"], models("flux")

    def tiled(executor, x, *args, **kwargs):
        return torch.cat([executor(tile, *args, **kwargs) for tile in x.split(8, dim=2)], 2)

    theirs = model.clone()
    theirs.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "theirs", tiled)
    expected = sample(theirs, tiny, tiny.size(8, 10))
    assert (
        relative_error(sample(attach(theirs, FAST, Shuffle), tiny, tiny.size(8, 10)), expected)
        < 1e-4
    )
    real = sample(attach(theirs, FAST), tiny, tiny.size(8, 10))
    assert real.isfinite().all()
