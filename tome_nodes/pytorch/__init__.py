"""diffusers and latent-diffusion, whose models are called as PyTorch modules: a pair of hooks."""
