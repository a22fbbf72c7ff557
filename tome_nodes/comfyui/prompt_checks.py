"""Refuse a prompt with an error on the one input that is at fault.

The host validates all inputs of a node together, and reports the error once for each input. So
prompts are checked as they reach the server: if a node has a fault, only the input at fault is left
for the host to validate.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from comfy_execution.graph_utils import is_link
from comfy_execution.utils import get_executing_context

Verdict = str | bool
"""The error message of a node, or True if it has none."""

LINKS = "links"
"""The input that the host reports where a link is at fault.

It reports only what ``validate_inputs`` gets. That cannot be an input that nobody knows, and if it
were a required one, which the host always finds, the host would report it beside any other.
"""

# The host validates a prompt in the same context in which it receives it.
_verdicts: ContextVar[Mapping[str, Verdict]] = ContextVar("verdicts", default=MappingProxyType({}))


@dataclass(frozen=True)
class Checked:
    """How the nodes of a class are checked.

    Attributes:
        slots: the inputs that take links only, which ``validate_inputs`` does not get.
        fault: takes the inputs of a node; returns the input at fault, which may be :data:`LINKS`,
            and an error message, or None.
    """

    slots: Set[str]
    fault: Callable[[Mapping[str, Any]], tuple[str, str] | None]


def look_at(classes: Mapping[str, Checked]) -> None:
    """Make the server look for faults in the nodes of these classes in each prompt."""
    # Imported here, as it is not needed without a server.
    from server import PromptServer

    def look(request: Any) -> Any:
        verdicts: dict[str, Verdict] = {}
        for number, node in _nodes(request):
            checked = classes.get(node["class_type"])
            if checked is None:
                continue
            # Without any inputs the host would answer HTTP 500, or its queue would stop.
            if not isinstance(node.get("inputs"), dict):
                node["inputs"] = {}
            inputs = node["inputs"]
            found = checked.fault(inputs)
            verdicts[number] = True if found is None else found[1]
            if found is not None:
                left = {*checked.slots, found[0]}
                node["inputs"] = {name: inputs[name] for name in inputs if name in left}
                if found[0] == LINKS:
                    node["inputs"][LINKS] = [number, 0]
        _verdicts.set(verdicts)
        return request

    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.add_on_prompt_handler(look)


def _nodes(request: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The nodes of a prompt by number, as far as they have a class."""
    prompt = request.get("prompt") if isinstance(request, dict) else None
    for number, node in prompt.items() if isinstance(prompt, dict) else ():
        if isinstance(node, dict) and isinstance(node.get("class_type"), str):
            yield number, node


def links(inputs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The inputs of a node that the host takes for links, by name."""
    return {name: value for name, value in inputs.items() if is_link(value)}


def verdict() -> Verdict | None:
    """The verdict on the node that the host is validating; None if its prompt was not looked at."""
    context = get_executing_context()
    return None if context is None else _verdicts.get().get(context.node_id)
