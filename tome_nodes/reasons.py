"""Why nothing was merged or skipped, in words for users: what is in the way, and what to do.

The log and the reports put "nothing merged: ", "no step was shallow: " or "nothing was forecast: "
before them. What to do
stands after the last semicolon. Where too little would merge, it depends on more than merging, and
is not part of the reason (:data:`WORTH_IT`).
"""

from collections.abc import Collection, Sequence

_OTHER = "another node or other code"

WORTH_IT = "the least that pays off"
"""The end of reasons that do not say what to do."""

LEAVE_OUT = "leave ToMe out"

_FEWER = "to save time, take fewer steps"

_FUTILE = (LEAVE_OUT, _FEWER)
"""What to do where nothing makes ToMe save time."""

TOKENS_CHANGED = (
    "another node or other code changes the tokens of the transformer blocks; leave one of the two "
    "out"
)

ATTENTION_MASKED = (
    "another node or other code masks the attention or changes its tokens; leave one of the two out"
)

ATTENTION_REPLACED = (
    "another node or other code replaces the attention of the transformer blocks; leave one of the "
    "two out"
)

OTHER_KEYS = (
    "another node or other code gives the self-attention its own keys; leave one of the two out"
)

BLOCKS_REPLACED = "another node replaces the transformer blocks; leave one of the two out"

NOT_CALLED = (
    "another node or other code runs the model by itself, so ToMe sees nothing of it; leave one of "
    "the two out"
)

CORE_TOME = "core's node TomePatchModel merges the same tokens; remove that node"

SPARSE_ATTENTION = (
    "Model Sparse Attention needs all keys, and is used instead; without that node, tokens merge"
)

REFERENCES = "beside reference pictures, tokens do not merge; take a preset that forecasts"

PICTURE_NOT_FOUND = (
    "references, keyframes or another node add tokens, among which the picture is not found; take "
    "a preset that forecasts"
)

ALL_OFF = "merge_attn, merge_crossattn and merge_mlp are all off; switch one on"

ATTENTION_OFF = "merge_attn is off, and nothing else merges in models of this kind; switch it on"

NO_MEMORY = "the device has no memory left for ToMe; take a smaller picture or batch"

NO_MORE_GRAPHS = (
    "torch.compile has made as many graphs of this model as it may, so other sizes run uncompiled; "
    "raise torch._dynamo.config.recompile_limit, or take fewer sizes"
)

RECOMPUTED = (
    "gradient checkpointing runs the transformer blocks again outside of the model's call; switch "
    "it off, or leave ToMe out"
)

TRACED = (
    "the model is traced or exported, which would keep the random picks of one step; compile it "
    "instead, or leave ToMe out"
)

UNKNOWN_CALL = (
    "the UNet was called without a sample and a timestep, as other code has replaced its forward; "
    "leave one of the two out"
)

FUSED = "fused projections need attn_tokens=q,k,v; unfuse them, or pass it"

OFF = "the ratio is 0, so the model stays as it is; raise it to save time"

GPU_WAITS = (
    "the GPU waited for its CPU, so less work saves no time: take a larger picture or batch, "
    "compile the model with CUDA graphs, or leave ToMe out"
)

LITTLE_ATTENTION = "little of this model's time is in self-attention; preset fast saves most"

NO_RATIO = "the ratio is 0 at every step that could merge; raise it"

FORECAST_GRADIENTS = "gradients are enabled, and a skipped step has none; nothing needs to be done"

EDIT = (
    "the model's answers hardly change over the steps, as in an edit, and the run is short; take "
    "one step fewer, which changes the picture less than a forecast would"
)

LEFT_OUT = (
    "only steps were sampled in which the model always runs, as something else left out the "
    "others, such as a cache; use one of the two"
)

FORECAST_PERCENTS = (
    "start_percent to end_percent covers only steps in which the model always runs: the first few "
    "and the last; widen them"
)

CHANGES = (
    "prompts, control, context windows, the latent or the model change, or something else leaves "
    "out steps, so often that no two steps in a row tell the next; leave ToMe out"
)

NEVER_SHALLOW = (
    "prompts, control, context windows, the latent or the model change in every step, or the "
    "sampler does not say how often it runs the model; take another sampler, or leave ToMe out"
)

TURNS = (
    "the model's answers turn back from step to step, as they do under strong guidance in few "
    "steps; lower the guidance, or take more steps"
)

_UNEVEN = "the scheduler's noise levels fall too unevenly here"

UNEVEN = f"{_UNEVEN}; take another scheduler, or more steps"

NOISE_RISES = "the noise level does not fall from step to step, as in an inversion; leave ToMe out"

CACHE = (
    "EasyCache or LazyCache skips steps of this run by its own measure; remove one of the two nodes"
)

MOMENTUM = (
    "guidance adds what it keeps from step to step, as APG does with a momentum; set the momentum "
    "to 0, or leave the node out"
)

MOVING_MASK = (
    "a mask that changes from step to step, as in Differential Diffusion, replaces other parts of "
    "the picture each time; leave the node out"
)

STREAMED = (
    "blocks bring in each other's weights, so none may be left out; offload without a stream, and "
    "in groups of one block or by leaf"
)

SEVERAL_DEVICES = (
    "the blocks of this model lie on several devices, which share no plan; put it on one, or leave "
    "ToMe out"
)

OTHER_RANKS = (
    "the model is spread over several ranks, and not all of them may skip these steps, as their "
    "prompts, settings or steps differ; give all ranks the same settings and as many steps"
)

OTHER_FORM = (
    "the model is called for more or other than one latent, as with layers or kept references; "
    "leave ToMe out"
)

OTHER_NOISE = (
    "the model is called at other noise levels than its pipeline's scheduler says; patch the "
    "pipeline that calls it"
)

# Why a merged key weighs as one token.
CALLED_DIFFERENTLY = "another node changes how the attention is called"
OTHER_ATTENTION = "another node replaces the attention function"
NO_WEIGHTS = "this host has no way to weigh them"
UNTRIED = "a compiled model calls an attention function that was not known before"


def takes_no_weights(function: str) -> str:
    """The reason for an attention function that is called so."""
    return f"{function} takes no weights"


def named(reason: str, others: Collection[str]) -> str:
    """A reason that names who is in the way, as far as it is known: the files of other nodes."""
    known = f"another node ({', '.join(sorted(others))})" if others else _OTHER
    return reason.replace(_OTHER, known)


def not_compiled(error: str) -> str:
    """For a model whose compiler failed on merging; ``error`` is what it says."""
    return (
        f"torch.compile failed on merging ({error}); do not compile this model, or leave ToMe out"
    )


def percents(start: float, end: float, begins: float = 0.0) -> str:
    """For a run of which no step lies between ``start_percent`` and ``end_percent``.

    ``begins`` is the share of the model's whole schedule that comes before the run.
    """
    where = f", which begins at {begins:.2f} of the model's whole schedule"
    return (
        f"start_percent={start} to end_percent={end} covers no step of this run"
        f"{where if begins >= 0.01 else ''}; widen them"
    )


def saves_little(saved: float, least: float) -> str:
    """For a preset under which merging saves a share of the work that is smaller than ``least``."""
    return f"merging would save {saved:.0%} of the work here, less than {least:.0%}, {WORTH_IT}"


def too_few(tokens: int, least: int, min_tokens: int) -> str:
    """For a feature map of fewer tokens than ``least``, which ``min_tokens`` decides unless 0."""
    if min_tokens:
        return f"{tokens} tokens are fewer than min_tokens={least}; lower it"
    return f"{tokens} tokens are fewer than {least}, {WORTH_IT}"


def take_fast(why: str) -> str:
    """What to do where preset *fast* would save time; ``why`` begins with "under which" or so."""
    return f"take preset fast, {why}"


def take_larger(times: float | None) -> str:
    """What to do where a picture is too small to merge in.

    ``times`` is how many times as wide and high it would have to be, None if that is too much.
    """
    if times is None:
        return LEAVE_OUT
    return f"take a picture {times:g} times as wide and high, or {LEAVE_OUT}"


def no_cell(height: int, width: int, sy: int, sx: int) -> str:
    """For a feature map that is smaller than a cell."""
    return (
        f"a feature map of {height}x{width} tokens holds no cell of sy={sy} by sx={sx}; take a "
        "larger picture"
    )


def low_ratio(tokens: int, ratio: float) -> str:
    """For a feature map that is too small for a ratio."""
    return f"{tokens} tokens are too few for ratio={ratio:g}; raise it"


def levels_left_out(max_downsample: int, shallowest: int) -> str:
    """For a model whose largest feature map with blocks is too small for ``max_downsample``."""
    return (
        f"max_downsample={max_downsample} leaves out every transformer block: this model's "
        f"start at {shallowest}; use preset fast, or max_downsample auto under preset custom"
    )


def cannot_merge(device: object, error: str) -> str:
    """For a device that fails to merge."""
    return f"the device {device} cannot do it: {error}; leave ToMe out"


def unknown_processor(name: str) -> str:
    """For an attention processor of diffusers that may need all tokens."""
    return f"the attention processor {name} may need all tokens; set another, or leave ToMe out"


def too_short(count: int, least: int) -> str:
    """For a run of ``count`` steps where forecasts need ``least``."""
    why = f"a run of {count} is too short, forecasts need {least} steps here"
    return f"{why}; {LEAVE_OUT if count == 1 else _FEWER}"


def shallow_failed(error: str) -> str:
    """For a shallow step that failed; ``error`` is what it says."""
    return (
        f"a shallow step failed ({error}), perhaps as other code reads or changes the blocks that "
        "it leaves out; leave one of the two out"
    )


def reads_attention(name: str) -> str:
    """For an attention processor of diffusers that may keep what it sees."""
    return f"the attention processor {name} may need all steps; set another, or leave ToMe out"


def too_short_for_shallow(count: int, least: int) -> str:
    """For a run of ``count`` steps where shallow ones need ``least``."""
    return f"a run of {count} is too short, shallow steps need {least}; {_FEWER}"


def sampler(name: str, instead: Sequence[str]) -> str:
    """For a sampler under which forecasts do harm, or are not known to do none.

    ``instead`` are the samplers under which this run would have forecasts.
    """
    return (
        f"under the sampler {name}, forecasts change the picture more than fewer steps do, or were "
        f"not tried; {_take(instead)}"
    )


def sampler_needs(name: str, least: int, instead: Sequence[str]) -> str:
    """For a sampler under which a run needs ``least`` steps, but fewer under others."""
    return f"under the sampler {name}, forecasts need {least} steps; {_take(instead)}"


def several(instead: Sequence[str]) -> str:
    """For a sampler that evaluates a step more than once."""
    return f"this sampler runs the model more than once a step; {_take(instead)}"


def uneven(scheduler: str | None) -> str:
    """For uneven noise levels; under ``scheduler``, if there is one, they would be even enough."""
    return f"{_UNEVEN}; {_FEWER if scheduler is None else f'take the scheduler {scheduler}'}"


def _take(names: Sequence[str]) -> str:
    if not names:
        return _FEWER
    *first, last = names
    return f"take {', '.join(first)} or {last}" if first else f"take {last}"


def split(reason: str) -> tuple[str, str]:
    """What is in the way, and what to do."""
    why, _, advice = reason.rpartition("; ")
    return why, advice


def helps(advice: str) -> bool:
    """Whether what a reason says to do makes ToMe save time."""
    return advice not in _FUTILE


def alone(why: str) -> str:
    """For a model of several ranks that do not agree any more."""
    return (
        f"{why}, so no step is skipped here any more; patch the model on all ranks alike, and give "
        "them as many steps"
    )


def unknown_scheduler(name: str) -> str:
    """For a scheduler of diffusers under which forecasts are not known to do no harm."""
    flows = "FlowMatchEulerDiscreteScheduler or UniPCMultistepScheduler"
    return (
        f"under this {name}, steps are evaluated more than once or not counted, or forecasts were "
        f"not tried; take {flows}"
    )


def unknown_prediction(name: str) -> str:
    """For a model of diffusers that is not known to predict a flow."""
    return f"it is not known how a {name} predicts the picture; leave ToMe out"
