"""Refuse a faulty prompt with an error at the one input that is at fault.

ComfyUI validates all inputs of a node together, and reports an error at every one. So prompts are
checked as they reach the server: a node with a wrong input keeps only that one in the prompt.
"""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from comfy_execution.utils import get_executing_context

from .node_texts import CAPTIONS
from .validation import fault
from .workflow import running_server

# ComfyUI validates a prompt in the context of the request that brought it.
_messages: ContextVar[Mapping[str, str]] = ContextVar("messages")

_CAPTIONS = {caption.id: caption for caption in CAPTIONS}


def look_at_prompts() -> None:
    """Make the server look for faults in our nodes in every prompt."""
    server = running_server()
    if server is not None:
        server.add_on_prompt_handler(_look)


def _look(request: Any) -> Any:
    messages: dict[str, str] = {}
    for number, node in _nodes(request):
        caption = _CAPTIONS.get(node["class_type"])
        if caption is None:
            continue
        # Without a dict of inputs, ComfyUI would answer HTTP 500, or its queue would stop.
        if not isinstance(node.get("inputs"), dict):
            node["inputs"] = {}
        inputs = node["inputs"]
        error = fault(caption, inputs)
        if error is not None:
            faulty, messages[number] = error
            # ComfyUI would report missing links too. It does not pass links on to be validated.
            left = {faulty, *(slot.name for slot in caption.inputs if not slot.is_text)}
            node["inputs"] = {name: inputs[name] for name in inputs if name in left}
            if faulty not in caption.names:
                # ComfyUI reports an error at an input that the node does not have if it is a link.
                node["inputs"][faulty] = [number, 0]
    _messages.set(messages)
    return request


def _nodes(request: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The nodes of a prompt that have a class, with their numbers."""
    prompt = request.get("prompt") if isinstance(request, dict) else None
    for number, node in prompt.items() if isinstance(prompt, dict) else ():
        if isinstance(node, dict) and isinstance(node.get("class_type"), str):
            yield number, node


def verdict() -> str | bool:
    """The error message on the node that ComfyUI is validating; True if there is none."""
    context = get_executing_context()
    return True if context is None else _messages.get({}).get(context.node_id, True)
