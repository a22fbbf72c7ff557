"""Refuse a faulty node of ours before anything runs, by the ``validate_inputs`` of ComfyUI.

ComfyUI checks ranges and choices itself, and passes ``validate_inputs`` only the inputs that its
signature names. It leaves their values to the node, and reports a message at each of them, so nodes
name one input and look at the others in the prompt.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from comfy_execution.utils import get_executing_context

from .node_texts import Caption
from .validation import fault
from .workflow import running_server

# ComfyUI validates a prompt in the context of the request that brought it.
_prompt: ContextVar[Mapping[str, Any]] = ContextVar("prompt")


def look_at_prompts() -> None:
    """Have the server show us the prompts that it validates."""
    server = running_server()
    if server is not None:
        server.add_on_prompt_handler(_look)


def _look(request: Any) -> Any:
    prompt = request.get("prompt") if isinstance(request, dict) else None
    _prompt.set(prompt if isinstance(prompt, dict) else {})
    return request


def verdict(caption: Caption) -> str | bool:
    """The error message on the node that ComfyUI is validating; True if there is none."""
    context = get_executing_context()
    if context is None or context.node_id not in (prompt := _prompt.get({})):
        return True
    # ComfyUI has converted the values in it.
    return fault(caption, prompt[context.node_id]["inputs"], prompt) or True
