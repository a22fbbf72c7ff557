"""Other nodes that take part in an evaluation, as its transformer options show."""

from collections.abc import Mapping, Set
from functools import partial
from typing import Any

from .. import reasons
from .models.base import OVERRIDE

KEY = "tome_nodes"
"""Our name among the options, wrappers and handlers of the host, and in those of our modules."""

IN_THE_WAY = {
    "nodes_tomesd": reasons.CORE_TOME,
    # It needs as many keys as queries, and raises no error if merging leaves fewer.
    "nodes_sparse_attention": reasons.SPARSE_ATTENTION,
}
"""Why nothing merges beside some of ComfyUI's own nodes, by their modules."""


def modules_in(options: Mapping[str, Any]) -> Set[str]:
    """The modules of the functions that other nodes put into attention or blocks."""
    functions = [options.get(OVERRIDE)]
    for name, patches in options.get("patches", {}).items():
        functions += patches if name.startswith("attn") else ()
    for replaced in options.get("patches_replace", {}).values():
        functions += replaced.values()
    modules = map(_module_of, filter(None, functions))
    return {module for module in modules if KEY not in module}


def obstacle_in(modules: Set[str]) -> reasons.Reason | None:
    """Why nothing merges beside functions of some modules; None if something may."""
    for module, reason in IN_THE_WAY.items():
        if any(other.endswith(module) for other in modules):
            return reason
    return None


def short(module: str) -> str:
    """The name of the pack that a module is from, or of a module of ComfyUI itself."""
    before, _, pack = module.replace("\\", "/").replace(".", "/").rpartition("custom_nodes/")
    return pack.partition("/")[0] if before else pack.rpartition("/")[2]


def _module_of(function: Any) -> str:
    """The module that a function is from, or its class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__
