"""Why nothing was merged or skipped, and what to do about it, in words for users.

The log and the reports put "nothing merged: ", "no step was shallow: " or "nothing was forecast: "
before them. This is all of them, one for each cause, made by a function where a number or a name
goes in.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

_OTHER = "another node or other code"

_LEAVE_OUT = "leave ToMe out"

_ONE_OF_TWO = "leave one of the two out"

_FEWER = "to save time, take fewer steps"

_EULER = "take the sampler euler and the scheduler simple"
"""Under these, steps are forecast in every run of four steps or more, as far as its sampler and
scheduler decide."""


class Reason(NamedTuple):
    """A reason. As a tuple, torch.compile can make one within a graph.

    Attributes:
        why: what is in the way.
        do: what to do.
    """

    why: str
    do: str

    def __str__(self) -> str:
        return f"{self.why}; {self.do}"

    @property
    def helps(self) -> bool:
        """Whether what is to be done makes ToMe save time."""
        return self.do not in (_LEAVE_OUT, _FEWER)


TOKENS_CHANGED = Reason(
    "another node or other code changes the tokens of the transformer blocks", _ONE_OF_TWO
)

ATTENTION_MASKED = Reason(
    "another node or other code masks the attention or changes its tokens", _ONE_OF_TWO
)

ATTENTION_REPLACED = Reason(
    "another node or other code replaces the attention of the transformer blocks", _ONE_OF_TWO
)

OTHER_KEYS = Reason("another node or other code gives the self-attention its own keys", _ONE_OF_TWO)

BLOCKS_REPLACED = Reason("another node replaces the transformer blocks", _ONE_OF_TWO)

NOT_CALLED = Reason(
    "another node or other code runs the model by itself, so ToMe sees nothing of it", _ONE_OF_TWO
)

CORE_TOME = Reason("core's node TomePatchModel merges the same tokens", "remove that node")

SPARSE_ATTENTION = Reason(
    "Model Sparse Attention needs all keys, and is used instead", "without that node, tokens merge"
)

REFERENCES = Reason(
    "beside reference pictures, tokens do not merge", "take a preset that forecasts"
)

PICTURE_NOT_FOUND = Reason(
    "references, keyframes or another node add tokens, among which the picture is not found",
    "take a preset that forecasts",
)

ALL_OFF = Reason("merge_attn, merge_crossattn and merge_mlp are all off", "switch one on")

ATTENTION_OFF = Reason(
    "merge_attn is off, and nothing else merges in models of this kind", "switch it on"
)

NO_MEMORY = Reason("the device has no memory left for ToMe", "take a smaller picture or batch")

NO_MORE_GRAPHS = Reason(
    "torch.compile has made as many graphs of this model as it may, so other sizes run uncompiled",
    "raise torch._dynamo.config.recompile_limit, or take fewer sizes",
)

RECOMPUTED = Reason(
    "gradient checkpointing runs the transformer blocks again outside of the model's call",
    "switch it off, or leave ToMe out",
)

TRACED = Reason(
    "the model is traced or exported, which would keep the random picks of one step",
    "compile it instead, or leave ToMe out",
)

UNKNOWN_CALL = Reason(
    "the UNet was called without a sample and a timestep, as other code has replaced its forward",
    _ONE_OF_TWO,
)

FUSED = Reason("fused projections need attn_tokens=q,k,v", "unfuse them, or pass it")

OFF = Reason("the ratio is 0, so the model stays as it is", "raise it to save time")

GPU_WAITS = Reason(
    "the GPU waited for its CPU, so less work saves no time",
    "take a larger picture or batch, compile the model with CUDA graphs, or leave ToMe out",
)

LITTLE_ATTENTION = Reason(
    "little of this model's time is in self-attention", "preset fast saves most"
)

NO_RATIO = Reason("the ratio is 0 at every step that could merge", "raise it")

GRADIENTS = Reason("gradients are enabled, and a skipped step has none", "nothing needs to be done")

EDIT = Reason(
    "the model's answers hardly change over the steps, as in an edit, and the run is short",
    "take one step fewer, which changes the picture less than a forecast would",
)

LEFT_OUT = Reason(
    "only steps were sampled in which the model always runs, as something else left out the "
    "others, such as a cache",
    "use one of the two",
)

FORECAST_PERCENTS = Reason(
    "start_percent to end_percent covers only steps in which the model always runs: the first few "
    "and the last",
    "widen them",
)

CHANGES = Reason(
    "prompts, control, context windows, the latent or the model change, or something else leaves "
    "out steps, so often that no two steps in a row tell the next",
    _LEAVE_OUT,
)

NEVER_SHALLOW = Reason(
    "prompts, control, context windows, the latent or the model change in every step, or the "
    "sampler does not say how often it runs the model",
    "take another sampler, or leave ToMe out",
)

TURNS = Reason(
    "the model's answers turn back from step to step, as they do under strong guidance in few "
    "steps",
    "lower the guidance, or take more steps",
)

UNEVEN = Reason("the scheduler's noise levels fall too unevenly here", "take another scheduler")

UNEVEN_IN_COMFYUI = Reason(UNEVEN.why, _EULER)

NOISE_RISES = Reason(
    "the noise level does not fall from step to step, as in an inversion", _LEAVE_OUT
)

TAKES_OVER = Reason(
    "this run takes over in nearly pure noise, where fewer steps change the picture little", _FEWER
)

SEVERAL = Reason("this sampler runs the model more than once a step", _EULER)

CACHE = Reason(
    "EasyCache or LazyCache skips steps of this run by its own measure",
    "remove one of the two nodes",
)

MOMENTUM = Reason(
    "guidance adds what it keeps from step to step, as APG does with a momentum",
    "set the momentum to 0, or leave the node out",
)

MOVING_MASK = Reason(
    "a mask that changes from step to step, as in Differential Diffusion, replaces other parts of "
    "the picture each time",
    "leave the node out",
)

STREAMED = Reason(
    "blocks bring in each other's weights, so none may be left out",
    "offload without a stream, and in groups of one block or by leaf",
)

SEVERAL_DEVICES = Reason(
    "the blocks of this model lie on several devices, which share no plan",
    "put it on one, or leave ToMe out",
)

OTHER_RANKS = Reason(
    "the model is spread over several ranks, and not all of them may skip these steps, as their "
    "prompts, settings or steps differ",
    "give all ranks the same settings and as many steps",
)

OTHER_FORM = Reason(
    "the model is called for more or other than one latent, as with layers or kept references",
    _LEAVE_OUT,
)

OTHER_NOISE = Reason(
    "the model is called at other noise levels than its pipeline's scheduler says",
    "patch the pipeline that calls it",
)

# Why a merged key weighs as one token: tokens merge all the same, so there is nothing to do.
CALLED_DIFFERENTLY = "another node changes how the attention is called"
OTHER_ATTENTION = "another node replaces the attention function"
NO_WEIGHTS = "this host has no way to weigh them"
UNTRIED = "a compiled model calls an attention function that was not known before"


def takes_no_weights(function: str) -> str:
    """Why keys weigh as one token in an attention function that is called so."""
    return f"{function} takes no weights"


def named(reason: Reason, others: Collection[str]) -> Reason:
    """A reason that names who is in the way, as far as it is known: the files of other nodes."""
    known = f"another node ({', '.join(sorted(others))})" if others else _OTHER
    return reason._replace(why=reason.why.replace(_OTHER, known))


def not_compiled(error: str) -> Reason:
    """For a model whose compiler failed on merging; ``error`` is what it says."""
    return Reason(
        f"torch.compile failed on merging ({error})", "do not compile this model, or leave ToMe out"
    )


def percents(start: float, end: float, begins: float = 0.0) -> Reason:
    """For a run of which no step lies between ``start_percent`` and ``end_percent``.

    ``begins`` is the share of the model's whole schedule that comes before the run.
    """
    where = f", which begins at {begins:.2f} of the model's whole schedule"
    return Reason(
        f"start_percent={start} to end_percent={end} covers no step of this run"
        f"{where if begins >= 0.01 else ''}",
        "widen them",
    )


def saves_little(saved: float, least: float, more: str) -> Reason:
    """For a preset under which merging saves a share of the work that is smaller than ``least``.

    ``more`` is the preset that would save enough; empty if there is none.
    """
    return Reason(
        f"merging would save {saved:.0%} of the work here, less than {least:.0%}, the least that "
        "pays off",
        f"take preset {more}" if more else _LEAVE_OUT,
    )


def too_few(tokens: int, least: int, min_tokens: int) -> Reason:
    """For a feature map of fewer tokens than ``least``, which ``min_tokens`` decides unless 0."""
    if min_tokens:
        return Reason(f"{tokens} tokens are fewer than min_tokens={least}", "lower it")
    return Reason(f"{tokens} tokens are fewer than {least}, the least that pays off", _LEAVE_OUT)


def no_cell(height: int, width: int, sy: int, sx: int) -> Reason:
    """For a feature map that is smaller than a cell."""
    return Reason(
        f"a feature map of {height}x{width} tokens holds no cell of sy={sy} by sx={sx}",
        "take a larger picture",
    )


def low_ratio(tokens: int, ratio: float) -> Reason:
    """For a feature map that is too small for a ratio."""
    return Reason(f"{tokens} tokens are too few for ratio={ratio:g}", "raise it")


def levels_left_out(max_downsample: int, shallowest: int, helpful: Sequence[str]) -> Reason:
    """For a model whose largest feature map with blocks is too small for ``max_downsample``.

    ``helpful`` are the changes that let something merge, in words.
    """
    return Reason(
        f"max_downsample={max_downsample} leaves out every transformer block: this model's "
        f"start at {shallowest}",
        ", or ".join(helpful) or _LEAVE_OUT,
    )


def cannot_merge(device: object, error: str) -> Reason:
    """For a device that fails to merge."""
    return Reason(f"the device {device} cannot do it: {error}", _LEAVE_OUT)


def unknown_processor(name: str) -> Reason:
    """For an attention processor of diffusers that may need all tokens."""
    return Reason(
        f"the attention processor {name} may need all tokens", "set another, or leave ToMe out"
    )


def too_short(count: int, least: int) -> Reason:
    """For a run of ``count`` steps where forecasts need ``least``."""
    return Reason(
        f"a run of {count} is too short, forecasts need {least} steps here",
        _LEAVE_OUT if count == 1 else _FEWER,
    )


def shallow_failed(error: str) -> Reason:
    """For a shallow step that failed; ``error`` is what it says."""
    return Reason(
        f"a shallow step failed ({error}), perhaps as other code reads or changes the blocks that "
        "it leaves out",
        _ONE_OF_TWO,
    )


def reads_attention(name: str) -> Reason:
    """For an attention processor of diffusers that may keep what it sees."""
    return Reason(
        f"the attention processor {name} may need all steps", "set another, or leave ToMe out"
    )


def too_short_for_shallow(count: int, least: int) -> Reason:
    """For a run of ``count`` steps where shallow ones need ``least``."""
    return Reason(f"a run of {count} is too short, shallow steps need {least}", _FEWER)


def sampler(name: str) -> Reason:
    """For a sampler under which forecasts do harm, or are not known to do none."""
    return Reason(
        f"under the sampler {name}, forecasts change the picture more than fewer steps do, or were "
        "not tried",
        _EULER,
    )


def sampler_needs(name: str, least: int) -> Reason:
    """For a sampler under which a run needs ``least`` steps, but fewer under euler."""
    return Reason(f"under the sampler {name}, forecasts need {least} steps", _EULER)


def alone(why: str) -> Reason:
    """For a model of several ranks that do not agree any more."""
    return Reason(
        f"{why}, so no step is skipped here any more",
        "patch the model on all ranks alike, and give them as many steps",
    )


def unknown_scheduler(name: str) -> Reason:
    """For a scheduler of diffusers under which forecasts are not known to do no harm."""
    return Reason(
        f"under this {name}, steps are evaluated more than once or not counted, or forecasts were "
        "not tried",
        "take FlowMatchEulerDiscreteScheduler",
    )


def unknown_prediction(name: str) -> Reason:
    """For a model of diffusers that is not known to predict a flow."""
    return Reason(f"it is not known how a {name} predicts the picture", _LEAVE_OUT)
