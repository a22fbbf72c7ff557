"""ComfyUI: its nodes, and the wrappers by which its models merge tokens."""
