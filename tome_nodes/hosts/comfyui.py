"""Attach token merging to a model of ComfyUI, and take it off again.

One pair of keyed wrappers on a clone of the model does it. The outer one makes the state of a
sampling run and drops it; the inner one puts ``forward`` overrides on the transformer blocks for
one model evaluation and takes them off again. Weights, patch lists and the source model are not
touched, so LoRA, saving, merging of models and other nodes' patches go on as before.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from comfy.ldm.modules.attention import SpatialTransformer, SpatialVideoTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock, UNetModel
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor, nn

from ..config import ToMeConfig
from ..grid import Grid
from ..picks import step_key
from ..recording import LastRun, Recorder
from ..schedule import NoiseRange, ratio_at, step_index
from ..statistics import RunStatistics, settings_in_words
from ..strategies import Strategy, make_strategy
from . import workflow
from .attention import weigh_attention
from .blocks import MergedBlock, MergedStack, MergedUNet, deepest_level
from .engine import Engine, make_engine

KEY = "tome_nodes"
"""Our name among the wrappers of a model and in its transformer options."""

# The host loads the pack under the name of its folder; the log should show ours.
log = logging.getLogger("tome_nodes")


def attach(
    model: ModelPatcher,
    config: ToMeConfig,
    make_strategy: Callable[[ToMeConfig], Strategy] = make_strategy,
    on_step: Callable[[str], None] | None = None,
    wants_details: Callable[[], bool] | None = None,
) -> ModelPatcher:
    """A clone of ``model`` that merges tokens as ``config`` says, in place of any earlier settings.

    Args:
        model: stays as it is.
        config: the settings.
        make_strategy: makes the strategy of each run.
        on_step: is told in each step what was merged, in a few words.
        wants_details: is asked at the start of each run whether to record it in detail.

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
    if not config.merges_nothing:
        attachment = _Attachment(config, make_strategy, levels, on_step, wants_details)
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, attachment.outer_sample)
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, attachment.apply_model)
    return clone


def is_attached(model: ModelPatcher) -> bool:
    """Whether a model merges tokens."""
    return _attachment(model) is not None


def last_run(model: ModelPatcher, samplers: Set[str] | None = None) -> LastRun | None:
    """The last run of a model that merges tokens, or of a clone of it; None if there was none.

    Args:
        model: as :func:`attach` made it.
        samplers: the nodes one of which must have run it, None where that does not matter.
    """
    runs = _attachment(model).runs
    matching = [run for node, run in runs.items() if samplers is None or node in samplers]
    return matching[-1] if matching else None


def _attachment(model: ModelPatcher) -> "_Attachment | None":
    wrappers = model.get_wrappers(WrappersMP.OUTER_SAMPLE, KEY)
    return wrappers[0].__self__ if wrappers else None


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
    """The wrappers of one patched model.

    Attributes:
        runs: what came of the last run of each node that samples, in the order in which they
            ended; all else of a run is dropped with it.
    """

    def __init__(
        self,
        config: ToMeConfig,
        make_strategy: Callable[[ToMeConfig], Strategy],
        blocks_by_level: dict[int, int],
        on_step: Callable[[str], None] | None = None,
        wants_details: Callable[[], bool] | None = None,
    ):
        self.config = config
        self.make_strategy = make_strategy
        self.on_step = on_step
        self.wants_details = wants_details
        self.runs: dict[str | None, LastRun] = {}
        self.shallowest = min(blocks_by_level)
        self.max_downsample = deepest_level(config, blocks_by_level)

    def merged(self, diffusion_model: nn.Module) -> MergedUNet:
        """The overrides for a UNet, which may be a deep clone of the one attached to."""
        transformers = [
            (name, module)
            for name, module in diffusion_model.named_modules()
            if isinstance(module, SpatialTransformer)
        ]
        return MergedUNet(self.config, self.max_downsample, _Stack, transformers)

    def outer_sample(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Around one sampling run: the host discards its model options, and our run, at its end."""
        sampler = workflow.running_node()
        self.runs.pop(sampler, None)
        run = _Run(self)
        guider = executor.class_obj
        guider.model_options["transformer_options"][KEY] = run
        result = executor(*args, **kwargs)
        run.log()
        self.runs[sampler] = run.summary(type(guider.model_patcher.model.model_config).__name__)
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
                stack.enter_context(run.evaluation(executor.class_obj, x, t, options))
            return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)


class _Run:
    """State of one sampling run."""

    def __init__(self, attachment: _Attachment):
        self.attachment = attachment
        self.statistics = RunStatistics()
        self._recorder: Recorder | None = None
        self._told_step: int | None = None
        self._unets: dict[nn.Module, tuple[MergedUNet, Engine]] = {}
        self._schedule: list[float] | None = None
        self._sigma: float | None = None
        self._calls: Counter[Hashable] = Counter()

    @contextmanager
    def evaluation(
        self, model: Any, x: Tensor, t: Tensor, options: dict[str, Any]
    ) -> Iterator[None]:
        """Merge tokens in ``model``, a host's BaseModel, while it evaluates noise level ``t``."""
        config, statistics = self.attachment.config, self.statistics
        sigma = t.max().item()
        if self._schedule is None:
            self._schedule = options.get("sample_sigmas", t[:1]).tolist()
            statistics.total_steps = max(1, len(self._schedule) - 1)
            wants_details = self.attachment.wants_details
            if wants_details is not None and wants_details():
                self._recorder = Recorder(Grid(*x.shape[-2:]), t.device)
        step = step_index(self._schedule, sigma)
        percent_to_sigma = model.model_sampling.percent_to_sigma
        active = NoiseRange(
            percent_to_sigma(config.start_percent), percent_to_sigma(config.end_percent)
        )
        if sigma not in active:
            statistics.skipped(
                f"start_percent={config.start_percent} to end_percent={config.end_percent} "
                "covers no step of this run"
            )
            self._tell(step, lambda: "all tokens")
            yield
            return
        unet, engine = self._parts(model, t.device)
        if engine.lacks is not None:
            statistics.skipped(f"the device {t.device} cannot do it: {engine.lacks}")
            yield
            return
        if self._recorder is not None:
            self._recorder.step = step
        ratio = ratio_at(config, step, statistics.total_steps)
        key = torch.full((), step_key(config.seed, step), dtype=torch.int64, device=t.device)
        composition = self._composition(options, sigma)
        with _lock_of(model.diffusion_model):
            unet.start_step(engine, key, ratio)
            unet.plans = unet.plans_for(step, composition)
            with unet.installed():
                yield
                if self._recorder is not None:
                    self._recorder.note(unet.blocks)
            unet.note(statistics, step)
        self._tell(step, unet.in_words)

    def _tell(self, step: int, words: Callable[[], str]) -> None:
        """Tell whoever follows the run what happened in a step, once."""
        on_step = self.attachment.on_step
        if on_step is not None and step != self._told_step:
            self._told_step = step
            on_step(f"{words()}, step {step + 1}/{self.statistics.total_steps}")

    def _parts(self, model: Any, device: torch.device) -> tuple[MergedUNet, Engine]:
        """The overrides for a model and what they run on, made when it is first evaluated."""
        unet = model.diffusion_model
        if unet not in self._unets:
            config, make_strategy = self.attachment.config, self.attachment.make_strategy
            engine = make_engine(config, make_strategy, device, model.get_dtype_inference())
            merged = self.attachment.merged(unet)
            if self._recorder is not None:
                engine = replace(engine, strategy=self._recorder.watched(engine.strategy))
                merged.recorder = self._recorder
            self._unets[unet] = merged, engine
        return self._unets[unet]

    def _composition(self, options: dict[str, Any], sigma: float) -> Hashable:
        """What the batch of an evaluation is made of, as far as one can tell from outside.

        Tiles of a picture tell nothing of themselves, but come in the same order in each step.
        """
        window = options.get("context_window")
        composition = (
            *options.get("uuids", ()),
            *options.get("cond_or_uncond", ()),
            None if window is None else tuple(window.index_list),
        )
        if sigma != self._sigma:
            self._sigma = sigma
            self._calls.clear()
        self._calls[composition] += 1
        return composition, self._calls[composition]

    def log(self) -> None:
        """Tell in one line what was merged, or why nothing was."""
        config, statistics = self.attachment.config, self.statistics
        if statistics.merged_anything:
            words = [statistics.summary(), *settings_in_words(config)]
            _, engine = next(iter(self._unets.values()))
            words += engine.in_words() + statistics.deviations()
            log.info("[ToMe] %s", ", ".join(words))
        elif statistics.total_steps:
            log.warning("[ToMe] nothing merged: %s", self._obstacle())

    def summary(self, model: str) -> LastRun:
        """What is kept of the run, of a kind of ``model``."""
        config, statistics = self.attachment.config, self.statistics
        engine = next((engine for _, engine in self._unets.values()), None)
        return LastRun(
            model,
            config,
            statistics,
            None if statistics.merged_anything else self._obstacle(),
            engine and (*engine.in_words(), engine.backend)[0],
            engine and engine.pays_from,
            self.attachment.shallowest,
            self._recorder and self._recorder.finish(),
        )

    def _obstacle(self) -> str:
        """Why nothing was merged."""
        attachment = self.attachment
        return self.statistics.obstacle(attachment.max_downsample, attachment.shallowest)


_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()


def _lock_of(diffusion_model: nn.Module) -> RLock:
    """Held while the overrides are on a UNet, so that two threads take them off in order."""
    return _locks.setdefault(diffusion_model, RLock())


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
        """Whether another node patches the inside of the block, or of all blocks."""
        options = {} if transformer_options is None else transformer_options
        patches, replaced = options.get("patches", {}), options.get("patches_replace", {})
        spatial_transformer = tuple(options.get("block", ()))
        return any(patches.get(name) for name in _BLOCK_PATCHES) or any(
            name in replaced.get(attention, {})
            for attention in ("attn1", "attn2")
            for name in (spatial_transformer, (*spatial_transformer, self.index))
        )

    def is_masked(self, kwargs: dict[str, Any]) -> bool:
        return kwargs.get("mask") is not None

    def weigh_keys(self, kwargs: dict[str, Any], log_sizes: Tensor) -> dict[str, Any]:
        self.unweighted = "another node replaces the attention function"
        options = kwargs.get("transformer_options") or {}
        ops = self.stack.unet.engine.ops
        weighed = weigh_attention(options, log_sizes, ops, self._note_unweighted)
        return kwargs | {"transformer_options": weighed}

    def _note_unweighted(self, reason: str | None) -> None:
        self.unweighted = reason


class _Stack(MergedStack):
    """What is ComfyUI's own about a spatial transformer."""

    block_class = _Block

    @property
    def runs_as_one(self) -> bool:
        # A video model runs a temporal block, which needs all tokens, after each spatial one.
        return not isinstance(self.module, SpatialVideoTransformer)
