"""What each kind of ComfyUI model needs to merge tokens."""
