"""Transformers of ComfyUI's own classes, in any width, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build(name: str, settings: Mapping[str, Any], dtype: Any = None) -> Any:
    """A model patcher that the host runs on its device.

    Args:
        name: the name of a class in ``comfy.supported_models``.
        settings: those of the class, as its loader would read them from a file.
        dtype: that of inference, float32 if None.
    """
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models
    import torch

    config = getattr(comfy.supported_models, name)(dict(settings))
    # The class has put sizes of the published model in their place.
    config.unet_config.update(settings)
    config.set_inference_dtype(dtype or torch.float32, None)
    device = torch.device("cpu")
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        # Fills memory that a file would be read into with NaN: some buffers are not parameters.
        torch.use_deterministic_algorithms(True)
        base = config.get_model({}, device=device)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    generator = torch.Generator().manual_seed(0)
    for buffer in base.buffers():
        if buffer.isnan().all():
            buffer.data.normal_(0.0, 0.3, generator=generator)
    for parameter in base.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.data.normal_(0.3, 0.3, generator=generator)
    return comfy.model_patcher.ModelPatcher(
        base, load_device=comfy.model_management.get_torch_device(), offload_device=device
    )
