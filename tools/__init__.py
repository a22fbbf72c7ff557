"""The parts of `dev.py` that run the pack on a real ComfyUI; not in the published pack."""
