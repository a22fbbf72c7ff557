"""The nodes of the pack, as ComfyUI's editor and queue see them."""

from functools import partial
from typing import Any

import torch
from comfy_api.latest import ComfyExtension, io, ui

from .config import CHOICES, MAX_DOWNSAMPLE_CHOICES, RANGES, ToMeConfig
from .hosts.comfyui import attachment, graph
from .presets import CUSTOM, FREE, PRESETS, settings_of
from .report import pages
from .report.pages import VIEWS

_DEFAULTS = ToMeConfig()
_CATEGORY = "model/patch/unet"
_ALIASES = ["token merging", "tomesd", "tome", "speed", "faster", "acceleration"]


def _number(
    kind: Any, name: str, tooltip: str, step: float, advanced: bool = False, **options: Any
) -> io.Input:
    least, most = RANGES[name]
    return kind.Input(
        name,
        default=getattr(_DEFAULTS, name),
        min=least,
        max=most,
        step=step,
        optional=True,
        advanced=advanced,
        tooltip=tooltip,
        **options,
    )


def _switch(name: str, tooltip: str, advanced: bool = False) -> io.Input:
    return io.Boolean.Input(
        name,
        default=getattr(_DEFAULTS, name),
        optional=True,
        advanced=advanced,
        tooltip=tooltip,
    )


def _choice(name: str, tooltip: str) -> io.Input:
    return io.Combo.Input(
        name,
        options=list(CHOICES[name]),
        default=getattr(_DEFAULTS, name),
        optional=True,
        advanced=True,
        tooltip=tooltip,
    )


def _config(
    # Not the default of the input: a file from before there were presets says none.
    preset: str = CUSTOM,
    max_downsample: str = str(_DEFAULTS.max_downsample),
    **settings: Any,
) -> ToMeConfig:
    choices = {str(choice): choice for choice in MAX_DOWNSAMPLE_CHOICES}
    settings["max_downsample"] = choices.get(max_downsample, max_downsample)
    return ToMeConfig(**settings_of(preset, settings))


class ToMePatchModel(io.ComfyNode):
    """Patch a model so that it merges tokens while it samples."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMePatchModel",
            display_name="ToMe Patch Model",
            category=_CATEGORY,
            description=(
                "Makes Stable Diffusion faster and lighter by token merging: where neighbouring "
                "image tokens are alike, the UNet works on their mean. Put it between the model "
                "loader and the sampler. Needs no training; gains most at large image sizes."
            ),
            search_aliases=_ALIASES,
            # Each tells of its own runs, also where another has the same inputs.
            not_idempotent=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="A UNet model: SD 1.x, SD 2.x, SDXL and their kin."
                ),
                _number(
                    io.Float,
                    "ratio",
                    "Share of the tokens to merge. More is faster and changes the picture more; "
                    "0 is exactly the unpatched model. One token of each cell always stays, so "
                    "at most 1 - 1/(sx*sy) merges: above 0.75 hardly more.",
                    step=0.05,
                ),
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default="balanced",
                    optional=True,
                    # For web/js/preset.js.
                    extra_dict={"custom": CUSTOM, "free": [*FREE]},
                    tooltip="How to merge. quality (0.75; 0.07): keys and values only; changes the "
                    "picture least. balanced (0.7; 0.12): the same, but merges more of them, 63 "
                    "% at ratio 0.5, to be as fast as paper. fast (0.55; 1.35): whole "
                    "transformer blocks; saves most, changes most, and is what SDXL needs. "
                    "paper (0.65; 1): as tomesd does it. custom: as the inputs below say; under "
                    "the other presets only seed, start_percent, end_percent and backend of "
                    "them count. In brackets: time (plain model 1) and change of the picture "
                    "(paper 1) at ratio 0.5, measured with a small model on a CPU.",
                ),
                io.Combo.Input(
                    "max_downsample",
                    options=[str(choice) for choice in MAX_DOWNSAMPLE_CHOICES],
                    default=str(_DEFAULTS.max_downsample),
                    optional=True,
                    tooltip="Merge where the feature map is at most this many times smaller than "
                    "the latent. auto takes the largest maps at which the model has attention, 1 "
                    "for SD 1.x and 2.x and 2 for SDXL; in scope block and stack it reaches "
                    "down to where most blocks are, 4 for SDXL. More: a little faster, and it "
                    "changes the picture more.",
                ),
                _switch("merge_attn", "Merge in self-attention, where most of the time is saved."),
                _switch(
                    "merge_crossattn",
                    "Merge in cross-attention too. Saves little and follows the prompt less well.",
                ),
                _switch(
                    "merge_mlp",
                    "Merge in the feed-forward network too. A little faster, with less detail.",
                ),
                _number(
                    io.Int,
                    "sx",
                    "Width of a cell in tokens. One token of each cell always stays.",
                    step=1,
                    advanced=True,
                ),
                _number(
                    io.Int,
                    "sy",
                    "Height of a cell in tokens. One token of each cell always stays.",
                    step=1,
                    advanced=True,
                ),
                _switch(
                    "use_rand",
                    "Pick the token that stays in each cell at random, anew in each step; better "
                    "pictures. Off: always the top left one.",
                    advanced=True,
                ),
                _number(
                    io.Int,
                    "seed",
                    "Seed of the random picks. It is apart from the sampler's seed and does not "
                    "move its noise.",
                    step=1,
                    advanced=True,
                    # Else the editor changes it after each run, and so the image.
                    control_after_generate=False,
                ),
                _number(
                    io.Float,
                    "start_percent",
                    "Point of the sampling at which merging starts; 0 is the first step.",
                    step=0.01,
                    advanced=True,
                ),
                _number(
                    io.Float,
                    "end_percent",
                    "Point of the sampling at which merging ends; 1 is the last step. Ending "
                    "early, at 0.8 say, keeps fine detail.",
                    step=0.01,
                    advanced=True,
                ),
                _choice(
                    "strategy",
                    "How tokens are grouped. bipartite: the paper's matching over the whole map. "
                    "window: the same within windows of 16x16 tokens, faster at large sizes. pool: "
                    "the mean of each cell, without comparing; ratio does not count. cluster: by "
                    "likeness to the mean token, wherever in the picture.",
                ),
                _choice(
                    "scope",
                    "What runs on merged tokens. module: what the switches above say. block: each "
                    "transformer block as a whole. stack: all blocks of a level at once, the most "
                    "saved, and what makes SDXL faster.",
                ),
                _choice(
                    "attn_tokens",
                    "Which tokens of self-attention to merge, in module scope: all, or the queries "
                    "only, or the keys and values only; these two save less and change the "
                    "picture less.",
                ),
                _number(
                    io.Int,
                    "reuse_steps",
                    "0 matches anew in each block, as the paper does. 1 matches once for all "
                    "blocks of a level in each step, 2 in every second step, and so on: faster, "
                    "and less exact.",
                    step=1,
                    advanced=True,
                ),
                _number(
                    io.Float,
                    "ratio_end",
                    "Ratio at the last step; it moves there from ratio in equal parts. The paper "
                    "found 0.6 falling to 0.4 better than a steady 0.5. -1 keeps ratio throughout.",
                    step=0.05,
                    advanced=True,
                ),
                _number(
                    io.Int,
                    "min_tokens",
                    "Merge only feature maps of at least this many tokens. 0 leaves out those "
                    "that would not get faster.",
                    step=1,
                    advanced=True,
                ),
                _choice(
                    "backend",
                    "What merging runs on. auto: Triton kernels on NVIDIA and AMD GPUs where "
                    "Triton is installed, plain torch elsewhere.",
                ),
                _number(
                    io.Float,
                    "kv_ratio",
                    "Share of the keys and values of self-attention to merge, apart from the "
                    "queries; module scope only. Merging keys costs far less likeness than merging "
                    "queries: ratio 0 with kv_ratio 0.75 is a gentle way to be fast. -1 takes "
                    "ratio for them too.",
                    step=0.05,
                    advanced=True,
                ),
                _switch(
                    "proportional_attn",
                    "Let a merged token weigh in self-attention as much as the tokens it stands "
                    "for, which keeps the picture much closer and takes hardly any time. Off: the "
                    "attention of the paper.",
                    advanced=True,
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model with token merging.")],
        )

    @classmethod
    def validate_inputs(
        cls,
        preset: Any = None,
        ratio: Any = None,
        sx: Any = None,
        sy: Any = None,
        start_percent: Any = None,
        end_percent: Any = None,
        ratio_end: Any = None,
        kv_ratio: Any = None,
    ) -> bool | str:
        """Check what the host cannot: NaN, and inputs that depend on each other or do not count.

        A value that is not known before the run, as it comes over a link, is None. The host leaves
        its own check of an input to us when it is named here, so the others are not: its message
        for those marks the one input at fault.
        """
        given = {
            "ratio": ratio,
            "sx": sx,
            "sy": sy,
            "start_percent": start_percent,
            "end_percent": end_percent,
            "ratio_end": ratio_end,
            "kv_ratio": kv_ratio,
        }
        known = {name: value for name, value in given.items() if value is not None}
        try:
            ToMeConfig(**settings_of(CUSTOM if preset is None else preset, known))
        except (TypeError, ValueError) as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model: Any, **settings: Any) -> io.NodeOutput:
        node = graph.running_node()
        in_workflow: dict[str, Any] = {}
        if node is not None:
            in_workflow = {
                "on_step": partial(graph.show_text, node),
                "wants_details": partial(graph.feeds, node, "ToMeReport", "model"),
            }
        return io.NodeOutput(attachment.attach(model, _config(**settings), **in_workflow))


class ToMeRemovePatch(io.ComfyNode):
    """Take token merging off a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMeRemovePatch",
            display_name="ToMe Remove Patch",
            category=_CATEGORY,
            description="Gives the model without any token merging; all other patches stay.",
            search_aliases=_ALIASES,
            inputs=[io.Model.Input("model", tooltip="A model, with token merging or without.")],
            outputs=[io.Model.Output(tooltip="The model without token merging.")],
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        return io.NodeOutput(attachment.detach(model))


class ToMeReport(io.ComfyNode):
    """Show what token merging did in a sampling run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMeReport",
            display_name="ToMe Report",
            category=_CATEGORY,
            description=(
                "Shows what token merging did in a sampling run: which parts of the picture were "
                "merged, how many tokens each block ran on, how long it took, and what to change "
                "where it gained nothing."
            ),
            search_aliases=[*_ALIASES, "statistics", "merge map", "heat map"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model that the sampler got, from ToMe Patch Model."
                ),
                io.Latent.Input(
                    "samples", tooltip="What the sampler made; the report is made after it."
                ),
                io.Image.Input(
                    "image",
                    optional=True,
                    tooltip="The decoded picture, to draw under the maps.",
                ),
                io.Combo.Input(
                    "view",
                    options=list(VIEWS),
                    default=VIEWS[0],
                    optional=True,
                    tooltip="merge map: each group of merged tokens in one colour, in one step. "
                    "heat map: how often each place was merged over all steps. chart: tokens and "
                    "time of each block in each step.",
                ),
                io.Int.Input(
                    "level",
                    default=-1,
                    min=-1,
                    max=64,
                    optional=True,
                    advanced=True,
                    tooltip="Which feature maps to show in the maps: those that are this many "
                    "times smaller than the latent, such as 1, 2 or 4. -1 shows the largest that "
                    "were merged.",
                ),
                io.Int.Input(
                    "step",
                    default=-1,
                    min=-1,
                    max=10000,
                    optional=True,
                    advanced=True,
                    tooltip="Which step to show in the merge map; 1 is the first. -1 shows the "
                    "last that merged.",
                ),
            ],
            outputs=[
                io.Image.Output(tooltip="The map or the chart."),
                io.String.Output(tooltip="The report in words."),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        samples: Any,
        image: Any = None,
        view: str = VIEWS[0],
        level: int = -1,
        step: int = -1,
    ) -> io.NodeOutput:
        if not attachment.is_attached(model):
            shown = pages.notice(*pages.NOT_MERGING)
        elif (run := attachment.last_run(model, graph.origins("samples"))) is None:
            shown = pages.notice(*pages.NO_RUN)
        else:
            picture = None if image is None else image[0].float().cpu().numpy()
            shown = pages.report_of(run, view, level, step, picture)
        if (node := graph.running_node()) is not None:
            graph.show_text(node, shown.text)
        drawn = torch.from_numpy(shown.picture).float()[None] / 255
        on_node = ui.PreviewImage(drawn, cls=cls).as_dict() | ui.PreviewText(shown.text).as_dict()
        return io.NodeOutput(drawn, shown.text, ui=on_node)


class ToMeExtension(ComfyExtension):
    """The pack as ComfyUI loads it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ToMePatchModel, ToMeRemovePatch, ToMeReport]


async def comfy_entrypoint() -> ToMeExtension:
    """Called by ComfyUI once, when it loads the pack."""
    return ToMeExtension()
