"""The texts of the nodes: names, descriptions, inputs and outputs."""

from dataclasses import dataclass

from ..settings.config import OPTIONS
from ..settings.options import REPORT_OPTIONS, TUNE_OPTIONS, Option
from ..settings.presets import PRESET


@dataclass(frozen=True)
class Slot:
    """An input or output for links.

    Attributes:
        name: its name; an output may be named by its type.
        text: the tooltip: what goes through it.
        type: ComfyUI's name for the type of what goes through it.
        optional: whether an input may be left out.
    """

    name: str
    text: str
    type: str
    optional: bool = False

    @property
    def is_text(self) -> bool:
        """Whether a prompt may have a text here instead of a link."""
        return self.type == "STRING"


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The texts of a node.

    Attributes:
        id: its class in workflow files.
        name: its title.
        text: what it does.
        inputs: its inputs for links, in order; in the editor they come before the options.
        options: its other inputs, in order.
        outputs: its outputs, in order.
    """

    id: str
    name: str
    text: str
    inputs: tuple[Slot, ...]
    options: tuple[Option, ...] = ()
    outputs: tuple[Slot, ...]

    @property
    def names(self) -> list[str]:
        """The names of all inputs, in the order of the editor."""
        return [slot.name for slot in self.inputs] + [option.name for option in self.options]


PATCH = Caption(
    id="ToMePatchModel",
    name="ToMe Patch Model",
    text="Makes SDXL and SD 1.5 faster at 1024x1024 and above, hires fix above all: parts of the "
    "picture that are alike are computed once, and some steps run the outer blocks only. In "
    "transformers such as Flux and Wan, it skips steps. Put it between the model loader and the "
    "sampler.",
    inputs=(
        Slot(
            "model",
            "A picture or video model, such as Z-Image, Flux, Qwen-Image, Wan, SDXL or SD 1.x.",
            "MODEL",
        ),
        Slot(
            "settings",
            "Settings that ToMe Tune found. They override the inputs below.",
            "STRING",
            optional=True,
        ),
    ),
    options=(PRESET, *OPTIONS.values()),
    outputs=(Slot("MODEL", "The patched model, for the sampler.", "MODEL"),),
)

REMOVE = Caption(
    id="ToMeRemovePatch",
    name="ToMe Remove Patch",
    text="Takes ToMe off a model; all other patches stay.",
    inputs=(Slot("model", "A model, with ToMe or without.", "MODEL"),),
    outputs=(Slot("MODEL", "The model without ToMe.", "MODEL"),),
)

TUNE = Caption(
    id="ToMeTune",
    name="ToMe Tune",
    text="Tells whether ToMe helps here, and with which settings: it tries a few on your model and "
    "device, fewer steps and EasyCache, and takes the settings that make the model as fast as you "
    "wish. It takes six to nine sampling runs, and none the next time. Give it what the sampler "
    "gets.",
    inputs=(
        Slot("model", "The model, after any LoRA.", "MODEL"),
        Slot("positive", "The prompt of the sampler.", "CONDITIONING"),
        Slot("negative", "The negative prompt of the sampler.", "CONDITIONING"),
        Slot("latent_image", "The latent of the sampler: what is found is for its size.", "LATENT"),
    ),
    options=TUNE_OPTIONS,
    outputs=(
        Slot(
            "MODEL",
            "The model with the settings found, or unpatched if none make it faster.",
            "MODEL",
        ),
        Slot("IMAGE", "The speed and the change of everything that was tried.", "IMAGE"),
        Slot("text", "What was found and tried, in words.", "STRING"),
        Slot(
            "settings",
            "The settings as JSON, for the input settings of ToMe Patch Model.",
            "STRING",
        ),
    ),
)

REPORT = Caption(
    id="ToMeReport",
    name="ToMe Report",
    text="Shows what ToMe did in a sampling run: which parts of the picture were merged or which "
    "steps were skipped, how long it took, and what to change where it gained nothing.",
    inputs=(
        Slot("model", "The model that the sampler got, from ToMe Patch Model.", "MODEL"),
        Slot("samples", "What the sampler made; the report is made after it.", "LATENT"),
        Slot("image", "The decoded picture, to draw under the merge map.", "IMAGE", optional=True),
    ),
    options=REPORT_OPTIONS,
    outputs=(
        Slot("IMAGE", "The merge map or the chart.", "IMAGE"),
        Slot("STRING", "The report in words.", "STRING"),
    ),
)

CAPTIONS = (PATCH, TUNE, REMOVE, REPORT)
"""All nodes."""
