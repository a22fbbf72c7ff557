"""The options of the nodes, each said once: its default, what is allowed, and what it does.

The checks of :class:`tome_nodes.settings.config.ToMeConfig` and the inputs of the nodes are made
from this when they load; the English locale and the tables of the help pages by ``python3 dev.py
generate``.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


class OptionError(ValueError):
    """An option has a value that is not allowed; the sentence tells which and what is.

    Attributes:
        option: the name of the one option at fault.
    """

    def __init__(self, option: str, sentence: str):
        super().__init__(sentence)
        self.option = option


class OptionTypeError(OptionError, TypeError):
    """An option has a value of the wrong type."""


def is_plain(value: Any) -> bool:
    """Whether a value is one that options have, and not something else that came over a link."""
    return isinstance(value, str | int | float)


def told(value: Any) -> str:
    """A value as an error message tells it; of a tensor, a model and the like only the type."""
    if value is None or is_plain(value):
        return reprlib.repr(value)
    return f"<{type(value).__name__}>"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: its name everywhere.
        default: its value where none is given, a bool, int, float or str as the option is.
        text: what it does, in two sentences at most: the tooltip.
        more: what the help page tells beside that.
        least: smallest value of a number.
        most: largest value of a number.
        step: what one click in the editor adds to a number.
        unset: value of a number, below ``least``, that stands for ``ratio``.
        choices: what it may be, if it is one of a few, and what each does where that takes a table.
        is_of_host: whether it is one of the names that the host has for something.
        advanced: whether the editor folds it away.
    """

    name: str
    default: Any
    text: str
    more: str = ""
    least: float = 0
    most: float = 0
    step: float = 1
    unset: float | None = None
    choices: Mapping[str | int, str] = field(default_factory=lambda: MappingProxyType({}))
    is_of_host: bool = False
    advanced: bool = False

    def check(self, value: Any) -> None:
        """Raise if a value is not allowed.

        Raises:
            OptionTypeError: it has the wrong type.
            OptionError: it is out of range, NaN, or none of the choices.
        """
        if self.choices:
            if not is_plain(value) or value not in self.choices:
                allowed = " | ".join(map(str, self.choices))
                raise self._error(OptionError, value, f"one of {allowed}")
        elif self.is_of_host:
            if not isinstance(value, str):
                raise self._error(OptionTypeError, value, "a name")
        elif isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise self._error(OptionTypeError, value, "true or false")
        elif isinstance(value, bool) or not isinstance(
            value, int if isinstance(self.default, int) else int | float
        ):
            kind = "a whole number" if isinstance(self.default, int) else "a number"
            raise self._error(OptionTypeError, value, kind)
        # NaN is not in any range.
        elif not self.least <= value <= self.most and value != self.unset:
            allowed = f"from {self.least} to {self.most}"
            if self.unset is not None:
                allowed = f"{self.unset:g}, to keep ratio, or {allowed}"
            raise self._error(OptionError, value, allowed)

    def _error(self, kind: type[OptionError], value: Any, allowed: str) -> OptionError:
        return kind(self.name, f"{self.name}={told(value)} is not allowed: it must be {allowed}")


def _choices(*names: str | int, **explained: str) -> Mapping[str | int, str]:
    return MappingProxyType({**dict.fromkeys(names, ""), **explained})


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        option.name: option
        for option in (
            Option(
                name="ratio",
                default=0.6,
                least=0.0,
                most=0.95,
                step=0.05,
                text="Share of the tokens to merge; under quality and balanced, of the keys and "
                "values of self-attention. More is faster and changes the picture more; 0 is "
                "exactly the unpatched model.",
                more="One token of each cell always stays, so of a picture at most `1 - 1/(sx*sy)` "
                "merge: 0.75 with the cells of quality, fast and paper, 0.875 with those of "
                "balanced.",
            ),
            Option(
                name="start_percent",
                default=0.0,
                least=0.0,
                most=1.0,
                step=0.01,
                text="Point of the sampling at which merging starts; 0 is the first step.",
            ),
            Option(
                name="end_percent",
                default=1.0,
                least=0.0,
                most=1.0,
                step=0.01,
                text="Point of the sampling at which merging ends; 1 is the last step. Ending "
                "early, at 0.8 say, keeps fine detail.",
            ),
            Option(
                name="seed",
                default=0,
                least=0,
                most=2**64 - 1,
                advanced=True,
                text="Seed of the random picks. It is apart from the sampler's seed and does not "
                "move its noise.",
            ),
            Option(
                name="backend",
                default="auto",
                choices=_choices("auto", "torch", "triton"),
                advanced=True,
                text="What merging runs on. auto: Triton kernels on NVIDIA and AMD GPUs where "
                "Triton is installed, plain torch elsewhere.",
                more="Where Triton cannot be used, the log line says why.",
            ),
            Option(
                name="strategy",
                default="bipartite",
                choices=_choices(
                    bipartite="The paper's matching: each token may merge into the most alike of "
                    "all the tokens that stay.",
                    window="The same within windows of 16x16 tokens. The cost of matching grows "
                    "with the picture and not with its square, so take this one for large "
                    "pictures.",
                    pool="The mean of each cell, without comparing. `ratio` does not count.",
                    cluster="Tokens that are about as like the mean of all, wherever they are in "
                    "the picture.",
                ),
                advanced=True,
                text="How tokens are grouped: bipartite matches over the whole map as in the "
                "paper, window within windows of 16x16 tokens, which is faster at large sizes. "
                "pool takes the mean of each cell whatever ratio says, and cluster goes by "
                "likeness to the mean token.",
            ),
            Option(
                name="scope",
                default="module",
                choices=_choices(
                    module="Self-attention, cross-attention and feed-forward network, each where "
                    "`merge_attn`, `merge_crossattn` and `merge_mlp` switch it on.",
                    block="Each transformer block as a whole; what it changes is added to all "
                    "tokens.",
                    stack="All transformer blocks of a level in one go. Saves most: on SDXL, most "
                    "of whose blocks come in stacks of ten. A transformer runs as a whole.",
                ),
                advanced=True,
                text="What runs on merged tokens: module is the modules that are switched on "
                "below, block each transformer block as a whole. stack is all blocks of a level "
                "at once, which saves most and is what makes SDXL faster.",
                more="Where another node patches the inside of a block, that block falls back to "
                "module; so do the blocks of transformers that can only merge in attention.",
            ),
            Option(
                name="attn_tokens",
                default="q,k,v",
                choices=_choices("q,k,v", "q", "k,v"),
                advanced=True,
                text="Which tokens of self-attention to merge, in module scope: all, or the "
                "queries only, or the keys and values only; these two save less and change the "
                "picture less.",
            ),
            Option(
                name="max_downsample",
                default="auto",
                choices=_choices("auto", 1, 2, 4, 8),
                advanced=True,
                text="Merge where the feature map is at most this many times smaller than the "
                "latent; more is a little faster and changes the picture more. auto takes the "
                "largest maps that have attention and, in scope block and stack, all down to "
                "those with most blocks.",
                more="That is 1 for SD 1.x and 2.x; for SDXL it is 2, and 4 in scope block and "
                "stack.",
            ),
            Option(
                name="merge_attn",
                default=True,
                advanced=True,
                text="Merge in self-attention, where most of the time is saved.",
            ),
            Option(
                name="merge_crossattn",
                default=False,
                advanced=True,
                text="Merge in cross-attention too. Saves little and follows the prompt less well.",
            ),
            Option(
                name="merge_mlp",
                default=False,
                advanced=True,
                text="Merge in the feed-forward network too. A little faster, with less detail.",
            ),
            Option(
                name="kv_ratio",
                default=-1.0,
                least=0.0,
                most=0.95,
                step=0.05,
                unset=-1.0,
                advanced=True,
                text="Share of the keys and values of self-attention to merge, in module scope; -1 "
                "takes ratio for them too. Merging keys changes the picture far less than merging "
                "queries: ratio 0 with kv_ratio 0.75 is gentle and fast.",
                more="Both shares come from one matching, the smaller one being its better part.",
            ),
            Option(
                name="ratio_end",
                default=-1.0,
                least=0.0,
                most=0.95,
                step=0.05,
                unset=-1.0,
                advanced=True,
                text="Ratio at the last step, to which it moves from ratio in equal parts; -1 "
                "keeps ratio throughout. The paper found 0.6 falling to 0.4 better than a steady "
                "0.5.",
            ),
            Option(
                name="sx",
                default=2,
                least=1,
                most=8,
                advanced=True,
                text="Width of a cell in tokens. One token of each cell always stays.",
            ),
            Option(
                name="sy",
                default=2,
                least=1,
                most=8,
                advanced=True,
                text="Height of a cell in tokens. One token of each cell always stays.",
            ),
            Option(
                name="st",
                default=0,
                least=0,
                most=8,
                advanced=True,
                text="Length of a cell in frames, for video; 0 takes 2 to 5, whichever divides the "
                "frames best. 1 keeps cells within frames.",
                more="A longer cell is `sx` or `sy` tokens in a row, whichever is fewer, in so "
                "many frames. The first latent frame always merges apart from the others. Where "
                "the whole model runs on merged tokens, 0 keeps cells within frames too.",
            ),
            Option(
                name="use_rand",
                default=True,
                advanced=True,
                text="Pick the token that stays in each cell at random, anew in each step; better "
                "pictures. Off: always the top left one.",
            ),
            Option(
                name="reuse_steps",
                default=0,
                least=0,
                most=100,
                advanced=True,
                text="0 matches anew in each block, as the paper does. 1 matches once for all "
                "blocks of a level in each step, 2 in every second step, and so on: faster, and "
                "less exact.",
            ),
            Option(
                name="min_tokens",
                default=0,
                least=0,
                most=2**20,
                advanced=True,
                text="Merge only feature maps of at least this many tokens. 0 leaves out those "
                "that would not get faster.",
                more="These are the ones below 256 tokens on a CPU; on a GPU below 4096, 3072 for "
                "`window` in transformers, 2048 for `window` on Triton, or 768 in scope block and "
                "stack (estimates).",
            ),
            Option(
                name="proportional_attn",
                default=True,
                advanced=True,
                text="Let a merged token weigh in self-attention as much as the tokens it stands "
                "for, which keeps the picture much closer and takes hardly any time; with "
                "SageAttention, which takes no weights, it counts once. Off: the attention of the "
                "paper.",
            ),
            Option(
                name="refresh_steps",
                default=0,
                least=0,
                most=100,
                advanced=True,
                text="In scope stack, one step in so many, counted back from the last but one, "
                "runs on all tokens. The steps after it keep the detail that it gave to merged "
                "tokens; 0: none does.",
                more="The first step does too if it begins with a picture, as in image to image. "
                "With `attn_tokens` k,v, self-attention in a UNet merges keys and values even in "
                "these steps. Each stack of a UNet keeps a tensor of the size of its tokens; a "
                "transformer keeps two latents.",
            ),
        )
    }
)
"""The options of token merging by name, in the order of the node's inputs."""

VIEW = Option(
    name="view",
    default="merge map",
    choices=MappingProxyType(
        {
            "merge map": "Each group of merged tokens in one colour, with its outline, in one "
            "step. With a picture, a group has the mean of its colours, and what was not merged is "
            "the picture as it is. Without, the colours only tell groups apart, and what was not "
            "merged is dark.",
            "heat map": "How often each place was merged over the steps, from in no step to in "
            "every step. With a picture, it shines through.",
            "chart": "For each block and step that had merging on: the share of its tokens that "
            "were kept, and the time it took. The bars are the mean over the steps; those of "
            "blocks that merged are orange.",
        }
    ),
    text="What to draw: merge map is each group of merged tokens in one colour in one step, heat "
    "map how often each place was merged over all steps. chart is tokens and time of each block "
    "in each step.",
)

LEVEL = Option(
    name="level",
    default=-1,
    least=-1,
    most=64,
    advanced=True,
    text="Which feature maps to show in the maps: those that are this many times smaller than the "
    "latent, such as 1, 2 or 4. -1 shows the largest that were merged.",
)

FRAME = Option(
    name="frame",
    default=-1,
    least=-1,
    most=10000,
    advanced=True,
    text="Which frame of the latent of a video to show in the maps; 1 is the first. -1 shows the "
    "one in the middle.",
)

GOAL = Option(
    name="goal",
    default="speed",
    choices=MappingProxyType(
        {
            "speed": "At least `speed_up` times as fast as without merging, with the least change.",
            "likeness": "At most `change`, as fast as can be.",
        }
    ),
    text="What the settings should reach. speed: at least speed_up, with the least change to the "
    "picture; likeness: at most change, as fast as can be.",
)

SPEED_UP = Option(
    name="speed_up",
    default=1.3,
    least=1.0,
    most=4.0,
    step=0.05,
    text="Under goal speed: how many times as fast the model should run. 1 leaves it unpatched.",
)

CHANGE = Option(
    name="change",
    default=0.1,
    least=0.0,
    most=1.0,
    step=0.01,
    text="Under goal likeness: how much the denoised picture may change in a step, in standard "
    "deviations of the picture. 0 leaves the model unpatched.",
)

MEASURE_AGAIN = Option(
    name="measure_again",
    default=False,
    text="Measure even if this was measured before. What is found is kept for the same kind of "
    "model, size, steps, device and versions, so that the same wish takes no trials.",
)

SAMPLING = (
    Option(
        name="seed",
        default=0,
        least=0,
        most=2**64 - 1,
        text="Seed of the noise in the trials, as in the sampler.",
    ),
    Option(
        name="steps",
        default=20,
        least=1,
        most=10000,
        text="Steps of the sampler. Trials take at most twice as many evaluations of the model, or "
        "8.",
    ),
    Option(
        name="cfg",
        default=8.0,
        least=0.0,
        most=100.0,
        step=0.1,
        text="As in the sampler; other than 1, the model runs on two prompts at once.",
    ),
    Option(
        name="sampler_name",
        default="euler",
        is_of_host=True,
        text="As in the sampler. The trials themselves go the way of Euler's.",
    ),
    Option(
        name="scheduler",
        default="simple",
        is_of_host=True,
        text="As in the sampler; it sets the noise levels of the trials.",
    ),
    Option(
        name="denoise",
        default=1.0,
        least=0.0,
        most=1.0,
        step=0.01,
        text="As in the sampler; below 1, sampling starts from the latent under some noise.",
    ),
)
"""What a sampler is given, as the host's KSampler has it."""

STEP = Option(
    name="step",
    default=-1,
    least=-1,
    most=10000,
    advanced=True,
    text="Which step to show in the merge map; 1 is the first. -1 shows the last that merged.",
)
