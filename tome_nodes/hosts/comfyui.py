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
from ..schedule import NoiseRange, least_tokens, ratio_at, step_index
from ..statistics import RunStatistics
from ..strategies import Strategy, make_strategy
from .blocks import MergedBlock, MergedUNet, missing_operation

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

    def merged(
        self, diffusion_model: nn.Module, strategy: Strategy, least_tokens: int
    ) -> MergedUNet:
        """The overrides for a UNet, which may be a deep clone of the one attached to."""
        # A video model runs a temporal block, which needs all tokens, after each spatial one.
        transformers = [
            (name, module, not isinstance(module, SpatialVideoTransformer))
            for name, module in diffusion_model.named_modules()
            if isinstance(module, SpatialTransformer)
        ]
        return MergedUNet(
            self.config, strategy, self.max_downsample, least_tokens, _Block, transformers
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
        self._unets: dict[nn.Module, MergedUNet] = {}
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
            unet = self.attachment.merged(model.diffusion_model, strategy, least)
            self._unets[model.diffusion_model] = unet
        if self._device_lacks is not None:
            statistics.skipped(f"the device {t.device} cannot do it: {self._device_lacks}")
            yield
            return
        ratio = ratio_at(config, step, statistics.total_steps)
        key = torch.full((), step_key(config.seed, step), dtype=torch.int64, device=t.device)
        unet.strategy.start_step(key, ratio)
        unet.plans = unet.plans_for(step, _composition(options))
        with unet.installed():
            yield
        unet.note(statistics, step)

    def _usable_strategy(self, device: torch.device, dtype: torch.dtype) -> Strategy:
        """The strategy on the backend that works on the device."""
        config, make = self.attachment.config, self.attachment.make_strategy
        self._backend, self._no_triton = resolve(config.backend, device, dtype)
        strategy = make(replace(config, backend=self._backend))
        self._device_lacks = missing_operation(strategy, device, dtype)
        if self._device_lacks is not None and self._backend == "triton":
            self._backend, self._no_triton = "torch", self._device_lacks
            strategy = make(replace(config, backend="torch"))
            self._device_lacks = missing_operation(strategy, device, dtype)
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


_BLOCK_PATCHES = (
    "attn1_patch",
    "attn1_output_patch",
    "attn2_patch",
    "attn2_output_patch",
    "middle_patch",
)


class _Block(MergedBlock):
    """What is ComfyUI's own about a transformer block."""

    tokens_changed = "another node changes the tokens of the transformer blocks"
    attention_masked = "another node masks the attention or changes its tokens"
    attention_replaced = "other nodes replace the attention of the transformer blocks"

    def attends_to_text(self, block: nn.Module) -> bool:
        # The x4 upscaler's blocks do.
        return block.disable_self_attn

    def grids(
        self, x: Tensor, context: Any = None, transformer_options: dict[str, Any] | None = None
    ) -> tuple[Grid, Grid] | None:
        options = {} if transformer_options is None else transformer_options
        shape, latent_shape = options.get("activations_shape"), options.get("original_shape")
        if (
            shape is None
            or latent_shape is None
            or shape[0] != x.shape[0]
            or shape[-2] * shape[-1] != x.shape[1]
        ):
            return None
        return Grid.of(shape, x.shape[1]), Grid(*latent_shape[-2:])

    def needs_all_tokens(
        self, context: Any = None, transformer_options: dict[str, Any] | None = None
    ) -> bool:
        """Whether another node patches the inside of the block."""
        options = {} if transformer_options is None else transformer_options
        patches, replaced = options.get("patches", {}), options.get("patches_replace", {})
        return any(patches.get(name) for name in _BLOCK_PATCHES) or any(
            replaced.get(name) for name in ("attn1", "attn2")
        )

    def is_masked(self, kwargs: dict[str, Any]) -> bool:
        return kwargs.get("mask") is not None


def _composition(options: dict[str, Any]) -> tuple[Any, ...]:
    """What the batch of an evaluation is made of."""
    window = options.get("context_window")
    return (
        *options.get("uuids", ()),
        *options.get("cond_or_uncond", ()),
        None if window is None else tuple(window.index_list),
    )
