"""Refuse a prompt at the one input that is at fault.

The host asks a node about all of its inputs together, and reports the answer once for each input
that it gave. So a prompt is looked at as it comes to the server: of a node with a fault, only the
input at fault goes on to the host's check.
"""

from collections.abc import Callable, Mapping, Set
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from comfy_execution.utils import get_executing_context

Verdict = str | bool
"""The sentence that a node is refused with, or true."""

# The host checks a prompt in the context that it received it in.
_verdicts: ContextVar[Mapping[str, Verdict]] = ContextVar("verdicts", default=MappingProxyType({}))


def look_at(
    class_type: str, names: Set[str], fault: Callable[[Mapping[str, Any]], tuple[str, str] | None]
) -> None:
    """Have the server look at each prompt for faults of the nodes of a class.

    Args:
        class_type: of the nodes.
        names: inputs that their ``validate_inputs`` is given.
        fault: tells the input at fault and a sentence, given the inputs of a node; else None.
    """
    # Without a server there is no reason to load it.
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
    """What was found of the node that the host checks; None if its prompt did not come by here."""
    context = get_executing_context()
    return None if context is None else _verdicts.get().get(context.node_id)
