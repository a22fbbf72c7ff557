"""The nodes of the pack, as ComfyUI's editor and queue see them."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from comfy_api.v0_0_2 import ComfyExtension, io, ui

from .. import reasons
from ..report import pages
from ..settings.options import SAMPLING, Option
from ..settings.presets import CUSTOM, FREE, PRESET
from ..tuning.search import SPEED, UNPATCHED, Wish
from . import attachment, prompt_checks, run_log, validation, workflow
from .node_texts import PATCH, REMOVE, REPORT, TUNE, Caption
from .tune.trials import HOST_NAMES, Sampling
from .tune.tuner import tune

_CATEGORY = "model/patch"
_ALIASES = ["token merging"]
# Aliases of ToMe Patch Model alone. If other nodes had them too, the editor's search would list
# those with shorter names first.
_WISHES = [
    *("faster", "fast", "speed", "speed up", "speedup", "accelerate", "acceleration"),
    *("tomesd", "merge tokens", "optimize", "performance", "too slow"),
]

_KINDS: Mapping[str, Any] = {
    kind.io_type: kind for kind in (io.Model, io.Conditioning, io.Latent, io.Image, io.String)
}
"""ComfyUI's classes of inputs and outputs, by :attr:`Slot.type`."""


def _schema(caption: Caption, **others: Any) -> io.Schema:
    """The schema of a node from its texts; ``others`` are its further settings."""
    return io.Schema(
        node_id=caption.id,
        display_name=caption.name,
        category=_CATEGORY,
        description=caption.text,
        inputs=[
            *(
                _KINDS[slot.type].Input(
                    slot.name,
                    tooltip=slot.text,
                    optional=slot.optional,
                    **({"force_input": True} if slot.is_text else {}),
                )
                for slot in caption.inputs
            ),
            *map(_input, caption.options),
        ],
        outputs=[
            _KINDS[slot.type].Output(display_name=slot.name, tooltip=slot.text)
            for slot in caption.outputs
        ],
        **others,
    )


def _input(option: Option) -> io.Input:
    extras: dict[str, Any] = {
        "default": option.default,
        "tooltip": option.text,
        "optional": True,
        "advanced": option.advanced,
    }
    if option is PRESET:
        # web/js/preset.js reads it.
        extras["extra_dict"] = {"custom": CUSTOM, "free": [*FREE]}
    if option.name == "seed":
        # Otherwise the editor changes the seed after every run, and so the image.
        extras["control_after_generate"] = False
    if option.choices or isinstance(option.default, str):
        names = [*map(str, option.choices)] or HOST_NAMES[option.name]
        return io.Combo.Input(option.name, options=names, **extras)
    if isinstance(option.default, bool):
        return io.Boolean.Input(option.name, **extras)
    kind: Any = io.Int if isinstance(option.default, int) else io.Float
    least = option.least if option.unset is None else option.unset
    return kind.Input(option.name, min=least, max=option.most, step=option.step, **extras)


def _validation(caption: Caption) -> Any:
    """The ``validate_inputs`` of a node. ComfyUI shows its message at the input ``model``."""

    def validate_inputs(cls: Any, model: Any = None) -> bool | str:
        return prompt_checks.verdict(caption)

    return classmethod(validate_inputs)


class ToMePatchModel(io.ComfyNode):
    """Patch a model so that it merges tokens while it samples."""

    validate_inputs = _validation(PATCH)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            PATCH,
            search_aliases=[*_ALIASES, *_WISHES],
            # Two nodes with the same inputs both run, since each reports its own runs.
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        validation.check(PATCH, {"model": model, **inputs})
        node = workflow.running_node()
        on_step = None if node is None else partial(workflow.show_text, node)
        config = validation.config_of(**inputs)
        patched = attachment.attach(
            model, config, on_step=on_step, wants_details=_wants_details(node)
        )
        if config.does_nothing(forecasts=not attachment.merges(model, config)):
            run_log.say(str(reasons.OFF))
        return io.NodeOutput(patched)


class ToMeTune(io.ComfyNode):
    """Find the settings that fulfil a wish, and patch a model with them."""

    validate_inputs = _validation(TUNE)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            TUNE,
            search_aliases=[*_ALIASES, "benchmark", "auto tune", "best settings"],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(
        cls, model: Any, positive: Any, negative: Any, latent_image: Any, **inputs: Any
    ) -> io.NodeOutput:
        slots = {"positive": positive, "negative": negative, "latent_image": latent_image}
        options = validation.options_of(TUNE, {"model": model, **slots, **inputs})
        goal = options["goal"]
        wish = Wish(goal, options["speed_up" if goal == SPEED else "change"])
        run = {option.name: options[option.name] for option in SAMPLING}
        sampling = Sampling(positive, negative, latent_image, **run)
        findings = tune(model, sampling, wish, options["measure_again"])
        settings = (findings.candidate or UNPATCHED).settings
        if findings.obstacle is None:
            tuned = attachment.attach(
                model,
                validation.config_of(**settings),
                wants_details=_wants_details(workflow.running_node()),
            )
        else:
            tuned = attachment.detach(model)
        page = pages.tuning_page(findings)
        drawn, on_node = _shown(cls, page)
        return io.NodeOutput(tuned, drawn, page.text, json.dumps(settings), ui=on_node)


class ToMeRemovePatch(io.ComfyNode):
    """Take token merging off a model."""

    validate_inputs = _validation(REMOVE)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(REMOVE, search_aliases=_ALIASES)

    @classmethod
    def execute(cls, model: Any, **others: Any) -> io.NodeOutput:
        validation.check(REMOVE, {"model": model, **others})
        return io.NodeOutput(attachment.detach(model))


class ToMeReport(io.ComfyNode):
    """Show what token merging did in a sampling run."""

    validate_inputs = _validation(REPORT)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            REPORT,
            search_aliases=[*_ALIASES, "statistics", "merge map"],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model: Any, samples: Any, image: Any = None, **inputs: Any) -> io.NodeOutput:
        options = validation.options_of(REPORT, {"model": model, "image": image, **inputs})
        if not attachment.is_attached(model):
            shown = pages.notice(*pages.NOT_MERGING)
        elif (run := attachment.last_run(model, workflow.origins("samples"))) is None:
            shown = pages.notice(*pages.NO_RUN)
        else:
            pictures = None if image is None else image.float().cpu().numpy()
            shown = pages.report_of(run, pictures=pictures, **options)
        drawn, on_node = _shown(cls, shown)
        return io.NodeOutput(drawn, shown.text, ui=on_node)


def _wants_details(node: str | None) -> Callable[[], bool] | None:
    """The ``wants_details`` of :func:`attachment.attach`: does a ToMe Report read this node?"""
    return None if node is None else partial(workflow.feeds, node, REPORT.id, "model")


def _shown(cls: Any, page: pages.Page) -> tuple[torch.Tensor, dict[str, Any]]:
    """The picture of a page, ``[1, height, width, 3]`` float from 0 to 1, and its data for the UI.

    ``web/js/report.js`` shows these on the node.
    """
    # A copy, because the picture may be read-only memory.
    drawn = torch.tensor(page.picture, dtype=torch.float32)[None] / 255
    return drawn, ui.PreviewImage(drawn, cls=cls).as_dict() | ui.PreviewText(page.text).as_dict()


class ToMeExtension(ComfyExtension):
    """The pack as ComfyUI loads it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ToMePatchModel, ToMeTune, ToMeRemovePatch, ToMeReport]


async def comfy_entrypoint() -> ToMeExtension:
    """Called once by ComfyUI, when it loads the pack."""
    prompt_checks.look_at_prompts()
    return ToMeExtension()
