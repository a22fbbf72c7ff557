"""diffusers and latent-diffusion, whose models are called as PyTorch modules."""
