"""Why nothing was forecast in a run, in words for users: what is in the way, and what to do."""

from .steps import SHORTEST

GRADIENTS = "gradients are computed, which a forecast has none of; nothing needs to be done"

EDIT = (
    "the model's answers hardly change over the steps, as in an edit, and the run is short; take "
    "one step fewer, which changes the picture less than a forecast would"
)

LEFT_OUT = (
    "only steps were sampled in which the model always runs, as something else left out the "
    "others, such as a cache; use one of the two"
)

PERCENTS = (
    "start_percent to end_percent covers only steps in which the model always runs: the first two "
    "or three, and the last; widen them"
)

CHANGES = (
    "prompts, guidance, control or the model change, or something else leaves out steps, so often "
    "that no two steps in a row tell the next; leave ToMe out"
)

TURNS = (
    "the model's answers turn back from step to step, as they do under strong guidance in few "
    "steps; lower the guidance, or take more steps"
)

UNEVEN = (
    "the scheduler's noise levels fall too unevenly for so few steps; take another scheduler, such "
    "as simple, or more steps"
)

NOISE_RISES = "the noise level does not fall from step to step, as in an inversion; leave ToMe out"

SEVERAL = "this sampler runs the model more than once a step; take euler, dpmpp_2m or res_multistep"

UNGUIDED = (
    "this sampler looks at the answer without guidance, which a forecast does not have; take "
    "euler, dpmpp_2m or res_multistep"
)

CACHE = (
    "EasyCache or LazyCache skips steps of this run by its own measure; remove one of the two nodes"
)

MOVING_WINDOWS = (
    "context windows that move from step to step make its answers jump; take a schedule of windows "
    "that stay, such as standard_static"
)

MOVING_MASK = (
    "a mask that changes from step to step, as in Differential Diffusion, replaces other parts of "
    "the picture each time; leave the node out"
)

MOMENTUM = (
    "guidance with momentum, as in APG, builds on every step; set the momentum to 0, or leave the "
    "node out"
)

OTHER_FORM = (
    "the model is called for more or other than one latent, as with layers or kept references; "
    "leave ToMe out"
)

OTHER_NOISE = (
    "the model is called at other noise levels than its pipeline's scheduler says; patch the "
    "pipeline that calls it"
)


def too_short(count: int, least: int = SHORTEST) -> str:
    """For a run of ``count`` steps where forecasts need ``least``."""
    instead = "leave ToMe out" if count == 1 else "to save time, take fewer"
    return f"a run of {count} is too short, forecasts need {least} steps here; {instead}"


def sampler(name: str) -> str:
    """For a sampler under which forecasts do harm, or are not known to do none."""
    return (
        f"under the sampler {name}, forecasts change the picture more than fewer steps do, or were "
        "not tried; take euler, dpmpp_2m or res_multistep"
    )


def unknown_scheduler(name: str) -> str:
    """For a scheduler of diffusers under which forecasts are not known to do no harm."""
    return (
        f"under this {name}, steps are evaluated more than once or not counted, or forecasts were "
        "not tried; take FlowMatchEulerDiscreteScheduler or UniPCMultistepScheduler"
    )


def unknown_prediction(name: str) -> str:
    """For a transformer of diffusers that is not known to predict a flow."""
    return f"it is not known how a {name} predicts the picture; leave ToMe out"
