"""Models that are called as PyTorch modules, of diffusers and latent-diffusion: a pair of hooks."""
