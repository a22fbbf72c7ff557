"""Refuse a prompt with an error on the one input that is at fault.

The host validates all inputs of a node together, and reports the error once for each input. So
prompts are checked as they reach the server: if a node has a fault, only the input at fault is left
for the host to validate.
"""

from collections.abc import Callable, Mapping, Set
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from comfy_execution.utils import get_executing_context

Verdict = str | bool
"""The error message of a node, or True if it has none."""

# The host validates a prompt in the same context in which it receives it.
_verdicts: ContextVar[Mapping[str, Verdict]] = ContextVar("verdicts", default=MappingProxyType({}))


def look_at(
    class_type: str, names: Set[str], fault: Callable[[Mapping[str, Any]], tuple[str, str] | None]
) -> None:
    """Make the server look for faults in the nodes of a class in each prompt.

    Args:
        class_type: the class of the nodes.
        names: the inputs that their ``validate_inputs`` gets.
        fault: takes the inputs of a node; returns the input at fault and an error message, or None.
    """
    # Imported here, as it is not needed without a server.
    from server import PromptServer

    def look(request: dict[str, Any]) -> dict[str, Any]:
        verdicts: dict[str, Verdict] = {}
        prompt = request.get("prompt")
        for number, node in prompt.items() if isinstance(prompt, dict) else ():
            if isinstance(node, dict) and node.get("class_type") == class_type:
                inputs = node.get("inputs", {})
                found = fault(inputs)
                verdicts[number] = True if found is None else found[1]
                if found is not None:
                    others = names - {found[0]}
                    node["inputs"] = {
                        name: value for name, value in inputs.items() if name not in others
                    }
        _verdicts.set(verdicts)
        return request

    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.add_on_prompt_handler(look)


def verdict() -> Verdict | None:
    """The verdict on the node that the host is validating; None if its prompt was not looked at."""
    context = get_executing_context()
    return None if context is None else _verdicts.get().get(context.node_id)
