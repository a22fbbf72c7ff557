"""What `dev.py` needs to try and test the pack on a real ComfyUI; not in the published pack."""
