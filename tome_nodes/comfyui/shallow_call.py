"""How ComfyUI calls a UNet whose deep blocks do not run.

All blocks but the first input block and the last output block are deep.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PATCHES = (
    "input_block_patch",
    "input_block_patch_after_skip",
    "middle_block_after_patch",
    "output_block_patch",
)
"""The patches of other nodes that see feature maps between the blocks of a UNet."""

Options = dict[str, Any]
"""ComfyUI's transformer options of an evaluation."""


def shallow_options(options: Options, blocks: int) -> Options:
    """The transformer options of a shallow call of a UNet with so many output blocks.

    Patches of other nodes are called for the blocks that run only.
    """
    patches: Mapping[str, Sequence[Any]] = options.get("patches") or {}
    if not any(patches.get(name) for name in _PATCHES):
        return options
    runs = ("input", 0), ("output", blocks - 1)

    def outside(patch: Callable[..., Any]) -> Callable[..., Any]:
        def patched(h: Any, *others: Any) -> Any:
            given = h["transformer_options"] if isinstance(h, dict) else others[-1]
            if given["block"] in runs:
                return patch(h, *others)
            return (h, others[0]) if len(others) == 2 else h

        return patched

    left = {
        name: [outside(patch) for patch in patches[name]] for name in _PATCHES if name in patches
    }
    return {**options, "patches": {**patches, **left}}


def shallow_control(control: Any, blocks: int) -> Any:
    """What a ControlNet adds in a shallow call of a UNet with so many output blocks: nothing to
    those that do not run."""
    if not isinstance(control, Mapping):
        return control
    kept = {name: [*(added or ())] for name, added in control.items()}
    # The host takes what it adds from the end of each list: first of all for the deepest block.
    deep = {"input": slice(0, -1), "middle": slice(None)}
    deep["output"] = slice(max(0, len(kept.get("output", ())) - (blocks - 1)), None)
    for name, left_out in deep.items():
        if name in kept:
            kept[name][left_out] = [None] * len(kept[name][left_out])
    return kept
