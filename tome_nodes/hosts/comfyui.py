"""Attach token merging to a model of ComfyUI, and take it off again.

One pair of keyed wrappers on a clone of the model does it. The outer one makes the state of a
sampling run and drops it; the inner one puts ``forward`` overrides on the transformer blocks for
one model evaluation and takes them off again. Weights, patch lists and the source model are not
touched, so LoRA, saving, merging of models and other nodes' patches go on as before.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from comfy.ldm.modules.attention import SpatialTransformer, SpatialVideoTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock, UNetModel
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor, nn

from ..config import ToMeConfig
from ..grid import Grid
from ..ops import resolve
from ..picks import step_key
from ..plan import Plan
from ..schedule import NoiseRange, least_tokens, ratio_at, step_index
from ..scopes import change_on_merged, on_merged, self_attention_on_merged
from ..statistics import RunStatistics
from ..strategies import Strategy, make_strategy
from ..strategies.pool import PoolPlan

KEY = "tome_nodes"
"""Our name among the wrappers of a model and in its transformer options."""

# The host loads the pack under the name of its folder; the log should show ours.
log = logging.getLogger("tome_nodes")


def attach(
    model: ModelPatcher,
    config: ToMeConfig,
    make_strategy: Callable[[ToMeConfig], Strategy] = make_strategy,
) -> ModelPatcher:
    """A clone of ``model`` that merges tokens as ``config`` says, in place of any earlier settings.

    Raises:
        ValueError: the model is not a UNet with spatial transformers.
    """
    unet = _unet(model.get_model_object("diffusion_model"))
    levels = _blocks_by_level(unet)
    if not levels:
        raise ValueError(
            f"token merging needs a model with transformer blocks, and this {_class_name(unet)} "
            "has none"
        )
    clone = detach(model)
    if max(config.ratio, config.ratio_end) > 0:
        attachment = _Attachment(config, make_strategy, levels)
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, attachment.outer_sample)
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, attachment.apply_model)
    return clone


def detach(model: ModelPatcher) -> ModelPatcher:
    """A clone of ``model`` without token merging."""
    clone = model.clone()
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    return clone


def _class_name(model: nn.Module) -> str:
    return type(model).__name__


def _unet(diffusion_model: nn.Module) -> UNetModel:
    plain = getattr(diffusion_model, "_orig_mod", diffusion_model)
    if not isinstance(plain, UNetModel):
        raise ValueError(
            f"token merging is for UNet models (Stable Diffusion 1.x, 2.x, XL and their kin), "
            f"and this model is a {_class_name(plain)}"
        )
    return plain


def _blocks_by_level(unet: UNetModel) -> dict[int, int]:
    """Transformer blocks on the way down and in the middle, by how much smaller than the latent."""
    blocks: Counter[int] = Counter()
    downsample = 1
    for block in [*unet.input_blocks, unet.middle_block or ()]:
        for layer in block:
            if isinstance(layer, SpatialTransformer):
                blocks[downsample] += len(layer.transformer_blocks)
            elif isinstance(layer, Downsample) or (isinstance(layer, ResBlock) and layer.updown):
                downsample *= 2
    return dict(blocks)


class _Attachment:
    """The wrappers of one patched model; holds settings, no state of a run."""

    def __init__(
        self,
        config: ToMeConfig,
        make_strategy: Callable[[ToMeConfig], Strategy],
        blocks_by_level: dict[int, int],
    ):
        self.config = config
        self.make_strategy = make_strategy
        self.shallowest = min(blocks_by_level)
        if config.max_downsample != "auto":
            self.max_downsample = config.max_downsample
        elif config.scope == "module":
            self.max_downsample = self.shallowest
        else:
            # Whole blocks are worth merging where most of them are: in SDXL, one level deeper.
            self.max_downsample = min(
                blocks_by_level, key=lambda level: (-blocks_by_level[level], level)
            )

    def outer_sample(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Around one sampling run: the host discards its model options, and our run, at its end."""
        run = _Run(self)
        executor.class_obj.model_options["transformer_options"][KEY] = run
        result = executor(*args, **kwargs)
        run.log()
        return result

    def apply_model(
        self,
        executor: WrapperExecutor,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Around one model evaluation."""
        options = {} if transformer_options is None else transformer_options
        run: _Run | None = options.get(KEY)
        with ExitStack() as stack:
            if run is not None:
                stack.enter_context(run.evaluation(executor.class_obj, t, options))
            return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)


class _Run:
    """State of one sampling run."""

    def __init__(self, attachment: _Attachment):
        self.attachment = attachment
        self.statistics = RunStatistics()
        self._unets: dict[nn.Module, _MergedUNet] = {}
        self._device_lacks: str | None = None
        self._backend: str | None = None
        self._no_triton: str | None = None

    @contextmanager
    def evaluation(self, model: Any, t: Tensor, options: dict[str, Any]) -> Iterator[None]:
        """Merge tokens in ``model``, a host's BaseModel, while it evaluates noise level ``t``."""
        config, statistics = self.attachment.config, self.statistics
        sigma = t.max().item()
        schedule = options.get("sample_sigmas", t[:1]).tolist()
        step = step_index(schedule, sigma)
        statistics.total_steps = max(1, len(schedule) - 1)
        percent_to_sigma = model.model_sampling.percent_to_sigma
        active = NoiseRange(
            percent_to_sigma(config.start_percent), percent_to_sigma(config.end_percent)
        )
        if sigma not in active:
            statistics.skipped(
                f"start_percent={config.start_percent} to end_percent={config.end_percent} "
                "covers no step of this run"
            )
            yield
            return
        unet = self._unets.get(model.diffusion_model)
        if unet is None:
            strategy = self._usable_strategy(t.device, model.get_dtype_inference())
            least = least_tokens(config, t.device.type, self._backend)
            unet = _MergedUNet(model.diffusion_model, self.attachment, strategy, least)
            self._unets[model.diffusion_model] = unet
        if self._device_lacks is not None:
            statistics.skipped(f"the device {t.device} cannot do it: {self._device_lacks}")
            yield
            return
        statistics.blocks_present = len(unet.blocks)
        ratio = ratio_at(config, step, statistics.total_steps)
        key = torch.full((), step_key(config.seed, step), dtype=torch.int64, device=t.device)
        unet.strategy.start_step(key, ratio)
        unet.plans = unet.plans_for(step, options)
        with unet.installed():
            yield
        for block in unet.blocks:
            if block.slots_used is not None:
                statistics.merged(step, block.name, *block.slots_used)
                if block.fell_back:
                    statistics.fell_back.add(block.name)
            elif block.reason is not None:
                statistics.skipped(block.reason)

    def _usable_strategy(self, device: torch.device, dtype: torch.dtype) -> Strategy:
        """The strategy on the backend that works on the device."""
        config, make = self.attachment.config, self.attachment.make_strategy
        self._backend, self._no_triton = resolve(config.backend, device, dtype)
        strategy = make(replace(config, backend=self._backend))
        self._device_lacks = _missing_operation(strategy, device, dtype)
        if self._device_lacks is not None and self._backend == "triton":
            self._backend, self._no_triton = "torch", self._device_lacks
            strategy = make(replace(config, backend="torch"))
            self._device_lacks = _missing_operation(strategy, device, dtype)
        return strategy

    def log(self) -> None:
        """Tell in one line what was merged, or why nothing was."""
        config, statistics = self.attachment.config, self.statistics
        if statistics.merged_anything:
            capped = f" capped at {config.ratio_cap:.2f}" if config.ratio > config.ratio_cap else ""
            ratio = f"{config.ratio:.2f}"
            if config.ratio_end >= 0:
                ratio += f" to {config.ratio_end:.2f}"
            ways = [] if config.strategy == "bipartite" else [config.strategy]
            ways += [] if config.scope == "module" else [f"{config.scope} scope"]
            if self._backend == "triton":
                ways.append("triton")
            elif self._no_triton is not None:
                ways.append(f"torch as Triton cannot be used ({self._no_triton})")
            if statistics.fell_back:
                ways.append(f"module scope in {len(statistics.fell_back)} that other nodes patch")
            log.info(
                "[ToMe] %s", ", ".join([statistics.summary(), f"ratio {ratio}{capped}", *ways])
            )
        elif statistics.total_steps:
            reason = statistics.most_common_reason or (
                f"max_downsample={self.attachment.max_downsample} leaves out every transformer "
                f"block: this model's begin at {self.attachment.shallowest}; set it to auto"
            )
            log.warning("[ToMe] nothing merged: %s", reason)


def _missing_operation(strategy: Strategy, device: torch.device, dtype: torch.dtype) -> str | None:
    """What the device answers when it cannot run an operation of merging, None when it can."""
    grid = Grid(16, 16)
    try:
        strategy.start_step(torch.zeros((), dtype=torch.int64, device=device), 0.5)
        features = torch.ones(1, grid.tokens, 8, dtype=dtype, device=device)
        plan = strategy.plan(features, grid)
        merged = plan.merge(features)
        plan.unmerge(merged)
        plan.add_change(features, merged, merged)
    except Exception as error:
        # A kernel's compiler fails in ways of its own: no C compiler, say.
        return str(error).partition("\n")[0] or type(error).__name__
    return None


class _MergedUNet:
    """The overrides for the transformer blocks of one UNet, in one sampling run.

    Attributes:
        strategy: makes the plans.
        least_tokens: what a feature map must have to be merged.
        stacks: the overrides, by spatial transformer.
        blocks: the same, one after another.
        plans: the plans that blocks of one level share in the present evaluation, None where
            each block has its own.
    """

    def __init__(
        self,
        diffusion_model: nn.Module,
        attachment: _Attachment,
        strategy: Strategy,
        least_tokens: int,
    ):
        self.attachment = attachment
        self.strategy = strategy
        self.least_tokens = least_tokens
        self.stacks = [
            _MergedStack(name, module, self)
            for name, module in diffusion_model.named_modules()
            if isinstance(module, SpatialTransformer)
        ]
        self.blocks = [block for stack in self.stacks for block in stack.blocks]
        self.plans: dict[Grid, Plan | PoolPlan | None] | None = None
        self._kept: dict[tuple[Any, ...], tuple[int, dict[Grid, Plan | PoolPlan | None]]] = {}

    def plans_for(
        self, step: int, options: dict[str, Any]
    ) -> dict[Grid, Plan | PoolPlan | None] | None:
        """The plans to share in this evaluation: those of an earlier step, or none so far.

        A plan holds for the samples of one batch, so it is kept by what the batch is made of.
        """
        every = self.attachment.config.reuse_steps
        if every == 0:
            return None
        window = options.get("context_window")
        composition = (
            *options.get("uuids", ()),
            *options.get("cond_or_uncond", ()),
            None if window is None else tuple(window.index_list),
        )
        made_in, plans = self._kept.get(composition, (-1, {}))
        if made_in != step // every:
            plans = {}
            self._kept[composition] = (step // every, plans)
        return plans

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the overrides on for one model evaluation."""
        with ExitStack() as exits:
            for stack in self.stacks:
                stack.plan = stack.tokens = stack.merged = None
            for block in self.blocks:
                block.slots_used = block.reason = None
                block.fell_back = False
                for module, forward in block.overrides:
                    exits.enter_context(_forward_override(module, forward))
            yield


@contextmanager
def _forward_override(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Let ``module`` run ``forward``; an override that another node put there comes back after."""
    missing = object()
    before = module.__dict__.get("forward", missing)
    module.forward = forward
    try:
        yield
    finally:
        if before is missing:
            del module.forward
        else:
            module.forward = before


class _MergedStack:
    """The transformer blocks of one spatial transformer, which may run as one on merged tokens.

    Attributes:
        plan: the plan under which the stack runs, from its first block to its last.
        tokens: ``[batch, tokens, channels]`` that entered its first block.
        merged: ``[batch, slots, channels]``, their merge.
    """

    def __init__(self, name: str, module: SpatialTransformer, unet: _MergedUNet):
        self.unet = unet
        # A video model runs a temporal block, which needs all tokens, after each spatial one.
        self.runs_as_one = not isinstance(module, SpatialVideoTransformer)
        self.plan: Plan | PoolPlan | None = None
        self.tokens: Tensor | None = None
        self.merged: Tensor | None = None
        self.blocks = [
            _MergedBlock(f"{name}.{index}", block, self)
            for index, block in enumerate(module.transformer_blocks)
        ]

    def enter(self, plan: Plan | PoolPlan, x: Tensor) -> Tensor:
        """Merge what enters the first block."""
        self.plan, self.tokens, self.merged = plan, x, plan.merge(x)
        return self.merged

    def leave(self, y: Tensor) -> Tensor:
        """Add the change that all blocks made together to all tokens."""
        result = self.plan.add_change(self.tokens, self.merged, y)
        self.plan = self.tokens = self.merged = None
        return result


class _MergedBlock:
    """The overrides for one transformer block.

    Only attribute writes leave these methods, so that torch.compile can trace them.

    Attributes:
        name: path of the block within the UNet.
        overrides: modules and what they run instead of their ``forward``.
        slots_used: tokens before and after, once anything of the block ran on merged tokens.
        reason: why the block ran on all its tokens.
        fell_back: whether only its modules ran on merged tokens though a wider scope was asked for.
    """

    def __init__(self, name: str, block: nn.Module, stack: _MergedStack):
        config = stack.unet.attachment.config
        self.name = name
        self.stack = stack
        self.slots_used: tuple[int, int] | None = None
        self.reason: str | None = None
        self.fell_back = False
        self._plan: Plan | PoolPlan | None = None
        # With text as its context (x4 upscaler), attn1 is a cross-attention.
        if block.disable_self_attn:
            attend = on_merged
        else:
            attend = partial(self_attention_on_merged, attn_tokens=config.attn_tokens)
        self.overrides = [(block, self._block(block.forward))]
        if config.merge_attn:
            self.overrides.append((block.attn1, self._module(block.attn1.forward, attend)))
        if config.merge_crossattn and block.attn2 is not None:
            self.overrides.append((block.attn2, self._module(block.attn2.forward, on_merged)))
        if config.merge_mlp:
            self.overrides.append((block.ff, self._module(block.ff.forward, on_merged)))

    def _block(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        config, stack = self.stack.unet.attachment.config, self.stack

        def block_forward(
            x: Tensor, context: Any = None, transformer_options: dict[str, Any] | None = None
        ) -> Tensor:
            options = {} if transformer_options is None else transformer_options
            self._plan = None
            if stack.plan is None:
                plan = self._plan_for(x, options)
                self.fell_back = config.scope != "module" and _needs_all_tokens(options)
                if plan is None or config.scope == "module" or self.fell_back:
                    self._plan = plan
                    return forward(x, context=context, transformer_options=options)
                whole_stack = config.scope == "stack" and stack.runs_as_one
                if not whole_stack or self is not stack.blocks[0]:
                    self.slots_used = (x.shape[1], plan.slot_count)
                    return change_on_merged(
                        forward, plan, x, context=context, transformer_options=options
                    )
                x = stack.enter(plan, x)
            self.slots_used = (stack.tokens.shape[1], stack.plan.slot_count)
            y = forward(x, context=context, transformer_options=options)
            return stack.leave(y) if self is stack.blocks[-1] else y

        return block_forward

    def _module(
        self, forward: Callable[..., Tensor], run_on_merged: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        def module_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            plan = self._plan
            if plan is None:
                return forward(x, *args, **kwargs)
            if kwargs.get("mask") is not None or not plan.fits(x):
                self.reason = "another node masks the attention or changes its tokens"
                return forward(x, *args, **kwargs)
            self.slots_used = (x.shape[1], plan.slot_count)
            return run_on_merged(forward, plan, x, *args, **kwargs)

        return module_forward

    def _plan_for(self, x: Tensor, options: dict[str, Any]) -> Plan | PoolPlan | None:
        """The plan of this block, None where it is not to merge.

        The reason is noted, but for a block of another level: that is as the settings say.
        """
        shape, latent_shape = options.get("activations_shape"), options.get("original_shape")
        if (
            shape is None
            or latent_shape is None
            or shape[0] != x.shape[0]
            or shape[-2] * shape[-1] != x.shape[1]
        ):
            self.reason = "another node changes the tokens of the transformer blocks"
            return None
        grid = Grid.of(shape, x.shape[1])
        attachment = self.stack.unet.attachment
        config = attachment.config
        if not grid.is_within(Grid(*latent_shape[-2:]), attachment.max_downsample):
            return None
        least = self.stack.unet.least_tokens
        if grid.tokens < least:
            automatic = "" if config.min_tokens else ", which is where it pays here (min_tokens=0)"
            self.reason = f"{grid.tokens} tokens are fewer than {least}{automatic}"
            return None
        plan = self._shared_plan(x, grid)
        if plan is None:
            self.reason = f"{x.shape[1]} tokens are too few for ratio={config.ratio}"
        elif config.scope == "module" and not self.overrides[1:]:
            self.reason = "merge_attn, merge_crossattn and merge_mlp are all off"
        else:
            self.reason = "other nodes replace the attention of the transformer blocks"
        return plan

    def _shared_plan(self, x: Tensor, grid: Grid) -> Plan | PoolPlan | None:
        unet = self.stack.unet
        if unet.plans is None:
            return unet.strategy.plan(x, grid)
        if grid not in unet.plans:
            unet.plans[grid] = unet.strategy.plan(x, grid)
        return unet.plans[grid]


_BLOCK_PATCHES = (
    "attn1_patch",
    "attn1_output_patch",
    "attn2_patch",
    "attn2_output_patch",
    "middle_patch",
)


def _needs_all_tokens(options: dict[str, Any]) -> bool:
    """Whether another node patches the inside of a transformer block, and so expects all tokens."""
    patches, replaced = options.get("patches", {}), options.get("patches_replace", {})
    return any(patches.get(name) for name in _BLOCK_PATCHES) or any(
        replaced.get(name) for name in ("attn1", "attn2")
    )
