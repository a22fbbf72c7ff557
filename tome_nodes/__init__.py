"""Token merging for Stable Diffusion: the merge core and its hosts."""
