"""Tests on real models of ComfyUI, diffusers and latent-diffusion, and on ComfyUI's server."""

import comfyui_in_process  # noqa: F401
