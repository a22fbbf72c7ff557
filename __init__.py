"""ToMe Nodes: token merging for models of pictures and videos in ComfyUI."""

# pytest imports this file without a package, ComfyUI as a package.
if __package__:
    from .tome_nodes.comfyui.nodes import comfy_entrypoint

    WEB_DIRECTORY = "./web"

    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
