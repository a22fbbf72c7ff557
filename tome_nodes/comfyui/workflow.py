"""The workflow that ComfyUI is executing: which node runs, what feeds what, and text on nodes.

Nodes that a node creates while it runs are invisible to the user, and count as that node.
"""

import sys
from collections.abc import Set
from typing import Any

from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import is_link
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context


def running_node() -> str | None:
    """The id of the running node, None outside a workflow."""
    context = get_executing_context()
    return None if context is None else _workflow().get_real_node_id(context.node_id)


def in_words(node: str) -> str:
    """A node as a user knows it, for example ``KSampler (node 3)``."""
    workflow = _workflow()
    node = workflow.get_real_node_id(node)
    data = workflow.get_node(node)
    return f"{data.get('_meta', {}).get('title') or data['class_type']} (node {node})"


def origins(input_name: str) -> Set[str] | None:
    """The ids of all nodes upstream of an input of the running node, None outside a workflow."""
    context = get_executing_context()
    return None if context is None else _upstream(context.node_id, input_name)


def feeds(node: str, class_type: str, input_name: str) -> bool:
    """Whether ``node`` is upstream of an input of any node of ``class_type``."""
    workflow = _workflow()
    return any(
        workflow.get_node(reader)["class_type"] == class_type
        and node in _upstream(reader, input_name)
        for reader in workflow.all_node_ids()
    )


def running_server() -> Any:
    """ComfyUI's PromptServer in this process, None if there is none."""
    # To import ``server`` where none runs could find a module of another program.
    if "server" not in sys.modules:
        return None
    import server

    return getattr(getattr(server, "PromptServer", None), "instance", None)


def show_text(node: str, text: str) -> None:
    """Show a text on a node, in the editor that queued the workflow, if one did."""
    server = running_server()
    if server is not None and server.client_id is not None:
        # Nodes 2.0 renders it as Markdown, which needs two spaces before a line break.
        server.send_progress_text(text.replace("\n", "  \n"), node, server.client_id)


def _workflow() -> DynamicPrompt:
    return get_progress_state().dynprompt


def _upstream(node: str, input_name: str) -> Set[str]:
    workflow = _workflow()
    links = [workflow.get_node(node)["inputs"].get(input_name)]
    seen = set()
    while links:
        link = links.pop()
        if is_link(link) and link[0] not in seen and workflow.has_node(link[0]):
            seen.add(link[0])
            links += workflow.get_node(link[0])["inputs"].values()
    return {workflow.get_real_node_id(source) for source in seen}
