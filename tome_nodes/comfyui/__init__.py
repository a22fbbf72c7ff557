"""ComfyUI: one keyed pair of wrappers on a clone of its model."""
