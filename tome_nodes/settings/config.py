"""The settings of one patched model. Each option of token merging is defined here, and only here.

The checks of values, the inputs of the patch node and the arguments of
:func:`tome_nodes.apply_patch` are made from these definitions when they load. ``python3 dev.py
generate`` makes the English locale and the lists of the help pages from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .options import Option, OptionError
from .policy import PLAIN, Policy


def _option(default: Any, **others: Any) -> Any:
    """A field that holds all attributes of its :class:`Option` except the name."""
    return field(default=default, metadata=others)


def _advanced(default: Any, **others: Any) -> Any:
    """An option that the editor folds away."""
    return _option(default, advanced=True, **others)


def _choices(*names: str | int) -> dict[str | int, str]:
    return dict.fromkeys(names, "")


@dataclass(frozen=True, kw_only=True)
class ToMeConfig:
    """Validated settings, in the order of the patch node's inputs.

    ``ratio``, ``sx``, ``sy``, ``use_rand``, ``max_downsample`` and the ``merge_*`` switches have
    their meaning in section 4 of arXiv 2303.17604 and its code, except that ``max_downsample`` may
    be ``"auto"``. With ``proportional_attn``, a merged key weighs as in Bolya et al., ICLR 2023:
    the logarithm of its number of tokens is added to the logits.

    Raises:
        OptionTypeError: an option has the wrong type. The error is a ``TypeError``.
        OptionError: an option is out of range, or two options contradict each other. The error is a
            ``ValueError``. Its message names the option, its value and what is allowed.
    """

    ratio: float = _option(
        0.6,
        least=0.0,
        most=0.95,
        step=0.05,
        text="How much to save: more is faster and changes the picture more, and 0 is exactly the "
        "unpatched model. Lower it, to 0.3 say, if fine detail suffers; raise it for more speed.",
        more="It is the share of a UNet's tokens that merge, and in any model how many steps are "
        "skipped. Under balanced and fast, larger maps merge more: at 0.6, 0.60 of the keys and "
        "values of 64x64 tokens under balanced, 0.80 of 128x128 and 0.90 of 256x256; under fast "
        "0.84, 0.94 and 0.97. Otherwise one token of each cell always stays, so at most "
        "`1 - 1/(sx*sy)` merge: 0.75 under paper.",
    )
    start_percent: float = _option(
        0.0,
        least=0.0,
        most=1.0,
        step=0.01,
        text="Where merging or skipping starts on the model's whole schedule, from 0 to 1. A "
        "second pass at denoise 0.4 begins at about 0.6.",
    )
    end_percent: float = _option(
        1.0,
        least=0.0,
        most=1.0,
        step=0.01,
        text="Where merging or skipping ends on the model's whole schedule, of which a second pass "
        "takes the last part. Ending early, at 0.8 say, keeps fine detail.",
    )
    seed: int = _advanced(
        0,
        least=0,
        most=2**64 - 1,
        text="Seed of the random picks. It is separate from the sampler's seed and does not change "
        "its noise.",
    )
    backend: str = _advanced(
        "auto",
        choices=_choices("auto", "torch", "triton"),
        text="What merging runs on. auto: Triton kernels on NVIDIA and AMD GPUs where Triton is "
        "installed, plain torch elsewhere.",
        more="Where Triton cannot be used, the log line says why.",
    )
    strategy: str = _advanced(
        "bipartite",
        choices={
            "bipartite": "The paper's matching: each token may merge into the most alike of all "
            "the tokens that stay.",
            "window": "The same within windows of 16x16 tokens. The cost of matching grows with "
            "the number of tokens, not with its square, so use this one for large pictures.",
            "cluster": "k-means on how much each token is like the mean of all tokens (cosine), "
            "with as many clusters as tokens stay, as a much-copied summary of the paper has it. "
            "For the last 40 % of the timesteps, as there, set `start_percent` to 0.6. It changes "
            "pictures far more than bipartite does. Cells and random picks have no effect.",
        },
        text="How tokens are grouped: bipartite matches over the whole map as in the paper, window "
        "within windows of 16x16 tokens, which is faster at large sizes. cluster groups "
        "tokens that are equally like the mean of all, as a summary of the paper has it.",
    )
    scope: str = _advanced(
        "module",
        choices={
            "module": "Self-attention, cross-attention and feed-forward network, each where "
            "`merge_attn`, `merge_crossattn` and `merge_mlp` switch it on.",
            "stack": "All transformer blocks of a level in one go; what they change is added to "
            "all tokens. Saves most, above all on SDXL, where most blocks come in stacks of ten.",
        },
        text="What runs on merged tokens: module is the modules that are switched on below, stack "
        "all blocks of a level at once, which saves most and is what makes SDXL faster.",
        more="stack works in UNets only. Transformers fall back to module, and so does a block "
        "that another node patches inside.",
    )
    attn_tokens: str = _advanced(
        "q,k,v",
        choices=_choices("q,k,v", "k,v"),
        text="Which tokens of self-attention to merge, in module scope: all, or only the keys and "
        "values, which saves less and changes the picture less.",
        more="In a transformer, only keys and values merge, whatever is set.",
    )
    max_downsample: int | Literal["auto"] = _advanced(
        "auto",
        choices=_choices("auto", 1, 2, 4, 8),
        text="Merge where the feature map is at most this many times smaller than the latent; more "
        "is a little faster and changes the picture more. auto takes the largest maps that have "
        "attention and, in scope stack, all down to those with most blocks.",
        more="That is 1 for SD 1.x and 2.x; for SDXL it is 2, and 4 in scope stack.",
    )
    merge_attn: bool = _advanced(
        True, text="Merge in self-attention, where most of the time is saved."
    )
    merge_crossattn: bool = _advanced(
        False,
        text="Merge in cross-attention too. Saves little and follows the prompt less well.",
    )
    merge_mlp: bool = _advanced(
        False, text="Merge in the feed-forward network too. A little faster, with less detail."
    )
    ratio_end: float = _advanced(
        -1.0,
        least=0.0,
        most=0.95,
        step=0.05,
        unset=-1.0,
        text="Ratio at the last step, to which it moves from ratio in equal steps; -1 keeps ratio "
        "throughout. The paper found 0.6 falling to 0.4 better than a steady 0.5.",
        more="It is for merging; forecasts go by `ratio`.",
    )
    sx: int = _advanced(
        2,
        least=1,
        most=8,
        text="Width of a cell in tokens. One token of each cell always stays.",
        more="In video, a cell spans 2 to 5 frames, whichever divides them best, and `sx` or `sy` "
        "tokens of a row, whichever is fewer.",
    )
    sy: int = _advanced(
        2,
        least=1,
        most=8,
        text="Height of a cell in tokens. One token of each cell always stays.",
    )
    use_rand: bool = _advanced(
        True,
        text="Pick the token that stays in each cell at random, anew in each step; better "
        "pictures. Off: always the top left one.",
    )
    min_tokens: int = _advanced(
        0,
        least=0,
        most=2**20,
        text="Merge only feature maps of at least this many tokens. 0 leaves out maps that would "
        "not get faster.",
        more="On every device, these are the maps of fewer than 768 tokens.",
    )
    proportional_attn: bool = _advanced(
        True,
        text="Let a merged token weigh in self-attention as much as the tokens it stands for, "
        "which keeps the picture much closer and takes hardly any time; with SageAttention, which "
        "takes no weights, it counts once. Off: the attention of the paper.",
    )
    forecast: bool = _advanced(
        False,
        text="Skip the model in some steps, as many as ratio says, and forecast its output there "
        "from its last two. In a UNet, these steps are shallow: its first and last blocks still "
        "run, and only what the others gave is kept. In a transformer, nothing merges then.",
        more="Which steps these are, the page says below.",
    )

    policy: Policy = PLAIN
    """How merging depends on the size of feature maps. It is not an option: presets set it."""

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            option.check(getattr(self, name))
        if self.sx * self.sy == 1:
            raise OptionError(
                "sx",
                "sx=1 with sy=1 is not allowed: a cell of one token has nothing to merge; "
                "sx or sy must be at least 2",
            )
        if self.start_percent > self.end_percent:
            raise OptionError(
                "start_percent",
                f"start_percent={self.start_percent} is not allowed: it must not be greater than "
                f"end_percent={self.end_percent}",
            )

    @property
    def largest_ratio(self) -> float:
        """The largest ratio of any step."""
        return max(self.ratio, self.ratio_end)

    @property
    def shallow_ratio(self) -> float:
        """The ratio that decides how many steps of a UNet are shallow."""
        return self.ratio * self.policy.shallow

    @property
    def merges_queries(self) -> bool:
        """Whether self-attention merges its queries, and not its keys and values alone."""
        return self.attn_tokens == "q,k,v"

    @property
    def cell_sizes(self) -> tuple[tuple[int, int], ...]:
        """The sizes of a picture's cells to choose from, height and width, the smallest first."""
        return ((self.sy, self.sx), *self.policy.larger_cells)

    def does_nothing(self, forecasts: bool) -> bool:
        """Whether the ratio is 0; ``ratio_end`` does not count where steps are forecast."""
        return (self.ratio if forecasts else self.largest_ratio) == 0


OPTIONS: Mapping[str, Option] = {
    option.name: Option(name=option.name, default=option.default, **option.metadata)
    for option in fields(ToMeConfig)
    if option.metadata
}
"""The options of token merging by name."""
