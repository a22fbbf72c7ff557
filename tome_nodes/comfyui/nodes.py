"""The nodes of the pack, as ComfyUI's editor and queue see them."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from comfy_api.v0_0_2 import ComfyExtension, io, ui

from ..report import pages
from ..settings import removed
from ..settings.options import FRAME, LEVEL, SAMPLING, STEP, VIEW, Option, OptionError
from ..settings.presets import CUSTOM, FREE
from ..tuning.search import SPEED, UNPATCHED, Wish
from . import attachment, prompt_checks, validation, workflow
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


def _schema(
    caption: Caption, extras: Mapping[str, Mapping[str, Any]] = {}, **others: Any
) -> io.Schema:
    """The schema of a node.

    Args:
        caption: the texts of the node.
        extras: further settings of options, by name of the option.
        others: further settings of the schema.
    """
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
            *(_input(option, **extras.get(option.name, {})) for option in caption.options),
        ],
        outputs=[
            _KINDS[slot.type].Output(display_name=slot.name, tooltip=slot.text)
            for slot in caption.outputs
        ],
        **others,
    )


def _input(option: Option, **extras: Any) -> io.Input:
    extras |= {
        "default": option.default,
        "tooltip": option.text,
        "optional": True,
        "advanced": option.advanced,
    }
    if option.choices:
        return io.Combo.Input(option.name, options=[*map(str, option.choices)], **extras)
    if option.is_of_host:
        return io.Combo.Input(option.name, options=HOST_NAMES[option.name], **extras)
    if isinstance(option.default, bool):
        return io.Boolean.Input(option.name, **extras)
    kind: Any = io.Int if isinstance(option.default, int) else io.Float
    least = option.least if option.unset is None else option.unset
    return kind.Input(option.name, min=least, max=option.most, step=option.step, **extras)


def _given(*names: str) -> Callable[[Any], Any]:
    """Give a ``validate_inputs`` a signature with these inputs.

    ComfyUI passes only the inputs that are in the signature, and reports an error at each of them.
    With ``**inputs`` alone, it would report one at links that are not at fault.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def with_signature(function: Any) -> Any:
        parameters = [inspect.Parameter(name, kind) for name in ("cls", *names)]
        function.__signature__ = inspect.Signature(parameters)
        return function

    return with_signature


class _LinksChecked(io.ComfyNode):
    """A node that checks only its links; ComfyUI checks its values well enough."""

    @classmethod
    def validate_inputs(cls, links: Any = None) -> bool | str:
        """True if the links are valid, else an error message; see :data:`validation.LINKS`."""
        return prompt_checks.verdict() or True


class ToMePatchModel(io.ComfyNode):
    """Patch a model so that it merges tokens while it samples."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            PATCH,
            {
                # web/js/preset.js and web/js/earlier.js read it.
                "preset": {
                    "extra_dict": {
                        "custom": CUSTOM,
                        "free": [*FREE],
                        "read_as": {**removed.PRESETS},
                    }
                },
                # Otherwise the editor changes the seed after each run, and so the image.
                "seed": {"control_after_generate": False},
            },
            search_aliases=[*_ALIASES, *_WISHES],
            # Of two nodes with the same inputs, each is run: it reports its own runs.
            not_idempotent=True,
        )

    @classmethod
    @_given(
        *(validation.LINKS, "settings"),
        *(option.name for option in PATCH.options),
        *PATCH.former,
    )
    def validate_inputs(cls, **inputs: Any) -> bool | str:
        """True if the inputs are valid, else an error message.

        ComfyUI reports the message at every input that it passes. So
        :mod:`tome_nodes.comfyui.prompt_checks` leaves only the input at fault in the prompt.
        """
        found = prompt_checks.verdict()
        if found is not None:
            return found
        # ComfyUI passes None for a linked input.
        fault = validation.fault_of_options(
            {name: [] if value is None else value for name, value in inputs.items()}
        )
        return True if fault is None else fault[1]

    @classmethod
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        validation.check(PATCH, {"model": model, **inputs})
        node = workflow.running_node()
        on_step = None if node is None else partial(workflow.show_text, node)
        config = validation.config_of(**inputs)
        return io.NodeOutput(
            attachment.attach(model, config, on_step=on_step, wants_details=_wants_details(node))
        )


class ToMeTune(_LinksChecked):
    """Find the settings that fulfil a wish, and patch a model with them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            TUNE,
            {"seed": {"control_after_generate": False}},
            search_aliases=[*_ALIASES, "benchmark", "auto tune", "best settings"],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(
        cls, model: Any, positive: Any, negative: Any, latent_image: Any, **inputs: Any
    ) -> io.NodeOutput:
        slots = {"positive": positive, "negative": negative, "latent_image": latent_image}
        validation.check(TUNE, {"model": model, **slots, **inputs})
        options = {option.name: option.default for option in TUNE.options} | inputs
        for option in TUNE.options:
            option.check(options[option.name])
        goal = options["goal"]
        wish = Wish(goal, options["speed_up" if goal == SPEED else "change"])
        run = {option.name: options[option.name] for option in SAMPLING}
        sampling = Sampling(positive, negative, latent_image, **run)
        found = tune(model, sampling, wish, options["measure_again"])
        settings = (found.candidate or UNPATCHED).settings
        config = validation.config_of(**settings)
        node = workflow.running_node()
        try:
            tuned = attachment.attach(
                model,
                config,
                wants_details=_wants_details(node),
                tuned=found.measured,
            )
        except ValueError:
            # The model cannot merge; the text says why.
            tuned = model
        page = pages.tuning_page(found)
        drawn, on_node = _shown(cls, page)
        return io.NodeOutput(tuned, drawn, page.text, json.dumps(settings), ui=on_node)


class ToMeRemovePatch(_LinksChecked):
    """Take token merging off a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(REMOVE, search_aliases=_ALIASES)

    @classmethod
    def execute(cls, model: Any, **others: Any) -> io.NodeOutput:
        validation.check(REMOVE, {"model": model, **others})
        return io.NodeOutput(attachment.detach(model))


class ToMeReport(io.ComfyNode):
    """Show what token merging did in a sampling run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            REPORT,
            search_aliases=[*_ALIASES, "statistics", "merge map"],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def validate_inputs(cls, links: Any = None, view: Any = None) -> bool | str:
        """True if the links and the view are valid, else an error message.

        ComfyUI does not check an input that is taken here, and would refuse a view that went.
        """
        try:
            # It is None if it comes over a link.
            VIEW.check(VIEW.default if view is None else _view_of(view))
        except OptionError as error:
            return str(error)
        return prompt_checks.verdict() or True

    @classmethod
    def execute(
        cls,
        model: Any,
        samples: Any,
        image: Any = None,
        view: str = VIEW.default,
        level: int = LEVEL.default,
        step: int = STEP.default,
        frame: int = FRAME.default,
        **others: Any,
    ) -> io.NodeOutput:
        validation.check(REPORT, {"model": model, "image": image, **others})
        view = _view_of(view)
        for option, value in zip(REPORT.options, (view, level, step, frame), strict=True):
            option.check(value)
        if not attachment.is_attached(model):
            shown = pages.notice(*pages.NOT_MERGING)
        elif (run := attachment.last_run(model, workflow.origins("samples"))) is None:
            shown = pages.notice(*pages.NO_RUN)
        else:
            picture_at = None if image is None else partial(_frame_at, image)
            shown = pages.report_of(run, view, level, step, picture_at, frame)
        drawn, on_node = _shown(cls, shown)
        return io.NodeOutput(drawn, shown.text, ui=on_node)


def _view_of(given: Any) -> Any:
    """A view as this version names it."""
    # Other values may have no hash.
    return removed.VIEWS.get(given, given) if isinstance(given, str) else given


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


def _frame_at(image: Any, place: float) -> Any:
    """See :data:`pages.PictureAt`."""
    return image[round(place * (len(image) - 1))].float().cpu().numpy()


class ToMeExtension(ComfyExtension):
    """The pack as ComfyUI loads it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ToMePatchModel, ToMeTune, ToMeRemovePatch, ToMeReport]


async def comfy_entrypoint() -> ToMeExtension:
    """Called once by ComfyUI, when it loads the pack."""
    prompt_checks.look_at_prompts()
    return ToMeExtension()
