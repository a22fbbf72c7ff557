"""The situations of a run: other nodes, prompts, passes and samplers.

All nodes are ComfyUI's own. Where ComfyUI has no node, a few lines here do the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.hooks
import torch

# Without it, some of the nodes cannot be imported.
import comfy_extras.nodes_post_processing  # noqa: F401  # isort: skip
from comfy.samplers import KSAMPLER
from comfy_extras.nodes_apg import APG
from comfy_extras.nodes_cfg import CFGNorm, CFGZeroStar
from comfy_extras.nodes_context_windows import ContextWindowsManualNode
from comfy_extras.nodes_custom_sampler import (
    CFGOverride,
    FlipSigmas,
    SplitSigmas,
    SplitSigmasDenoise,
)
from comfy_extras.nodes_differential_diffusion import DifferentialDiffusion
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from comfy_extras.nodes_model_advanced import RescaleCFG
from comfy_extras.nodes_nag import NAGuidance
from comfy_extras.nodes_pag import PerturbedAttentionGuidance
from comfy_extras.nodes_slg import SkipLayerGuidanceDiT
from comfy_extras.nodes_tcfg import TCFG
from torch import Tensor

from benchmarks.forecasts.subjects import Prompt, Subject
from benchmarks.patches import Control, Patch, node

Prompts = tuple[Prompt, Prompt]
"""The positive and the negative one."""


@dataclass(frozen=True, eq=False)
class Situation:
    """What is special about a graph, besides its sampler, steps, guidance and schedule.

    Attributes:
        name: what the table calls it.
        patch: what another node does to the model.
        is_last: whether that node comes after ours.
        prompts: makes the prompts.
        passes: makes the noise levels of each sampler in a row from those of a whole run.
        wrap: what another node does to the sampler.
        is_short: whether so little memory is left in a step, from 0, that prompts share no call.
        is_video: whether it samples a video.
        batch: the number of pictures.
        begins: whether the run begins with a picture.
        masked: whether a mask says how much of the picture may change.
    """

    name: str
    patch: Patch = lambda model: model
    is_last: bool = False
    prompts: Callable[[Subject], Prompts] = lambda subject: (subject.positive, subject.negative)
    passes: Callable[[Tensor], Sequence[Tensor]] = lambda sigmas: (sigmas,)
    wrap: Callable[[KSAMPLER], KSAMPLER] = lambda sampler: sampler
    is_short: Callable[[int], bool] = lambda step: False
    is_video: bool = False
    batch: int = 1
    begins: bool = False
    masked: bool = False


def extended(prompt: Prompt, **extras: Any) -> Prompt:
    """A prompt with further entries, as the host's nodes add them."""
    return [[text, {**others, **extras}] for text, others in prompt]


def _with_second(subject: Subject, **extras: Any) -> Prompts:
    """A second positive prompt."""
    return subject.positive + extended(subject.other, **extras), subject.negative


def _in_two_calls(subject: Subject) -> Prompts:
    """Two prompts of lengths that cannot share a call."""
    return subject.positive, subject.short


def _in_area(subject: Subject) -> Prompts:
    high, wide = subject.shape[-2:]
    return _with_second(subject, area=(high // 2, wide, 0, 0), strength=1.0)


def _in_mask(subject: Subject) -> Prompts:
    high, wide = subject.shape[-2:]
    mask = torch.linspace(0, 1, wide).expand(1, high, wide)
    return _with_second(subject, mask=mask, mask_strength=1.0, set_area_to_bounds=False)


def _controlled(start: float, end: float, subject: Subject) -> Prompts:
    control = Control(lambda x: subject.hint).set_cond_hint(None, 1.0, (start, end))
    positive = extended(subject.positive, control=control, control_apply_to_uncond=True)
    return positive, subject.negative


def _hooked(subject: Subject, *frames: tuple[float, float]) -> Prompts:
    """A LoRA for the positive prompt only; ``frames`` are percents with the strength from there."""
    hooks = comfy.hooks.create_hook_lora(subject.lora, 1.0, 1.0)
    if frames:
        group = comfy.hooks.HookKeyframeGroup()
        for start, strength in frames:
            group.add(comfy.hooks.HookKeyframe(strength, start))
        hooks.set_keyframes_on_hooks(group)
    (positive,) = comfy.hooks.set_conds_props([subject.positive], 1.0, "default", hooks=hooks)
    return positive, subject.negative


def _split(sigmas: Tensor) -> Sequence[Tensor]:
    """Two samplers, the second of which takes over the noise that the first leaves."""
    halves: Sequence[Tensor] = SplitSigmas.execute(sigmas, len(sigmas) // 2).args
    return halves


def _restarting(sigmas: Tensor) -> Sequence[Tensor]:
    """A run that goes back up by a fifth of its steps once 60 % are done."""
    count = len(sigmas) - 1
    last, back = round(0.6 * count), max(1, round(0.2 * count))
    return (torch.cat([sigmas[: last + 1], sigmas[last - back :]]),)


def _inverted(sigmas: Tensor) -> Sequence[Tensor]:
    """From a picture up to noise, but not to pure noise, which has lost the picture; and back."""
    falling = sigmas[sigmas < 0.95]
    return FlipSigmas.execute(falling.clone()).args[0], falling


def _second_pass(sigmas: Tensor) -> Sequence[Tensor]:
    return (SplitSigmasDenoise.execute(sigmas, 0.5).args[1],)


def _lying(sampler: KSAMPLER) -> KSAMPLER:
    """The model is told 0.9 of the noise level in the middle of the run."""
    return KSAMPLER(_sample_lying, {"inner": sampler})


def _sample_lying(
    model: Any, x: Tensor, sigmas: Tensor, *others: Any, inner: KSAMPLER, **named: Any
) -> Tensor:
    first, last = 0.9 * sigmas.max(), 0.1 * sigmas.max()

    class Liar:
        """The model, with all that samplers read of it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, x: Tensor, sigma: Tensor, *others: Any, **named: Any) -> Any:
            told = 0.9 * sigma if last < sigma.max() < first else sigma
            return model(x, told, *others, **named)

    sample = inner.sampler_function
    sampled: Tensor = sample(Liar(), x, sigmas, *others, **named, **inner.extra_options)
    return sampled


def _windows(kind: str, **inputs: Any) -> Situation:
    given: dict[str, Any] = {
        "context_length": 8,
        "context_overlap": 4,
        "context_schedule": kind,
        "context_stride": 1,
        "closed_loop": False,
        "fuse_method": "pyramid",
        "dim": 2,
        "freenoise": False,
        "causal_window_fix": False,
    }
    name = " ".join(["windows", kind, *inputs])
    return Situation(name, node(ContextWindowsManualNode, **given | inputs), is_video=True)


def _in_both_orders(name: str, patch: Patch) -> tuple[Situation, Situation]:
    first = Situation(f"{name} before ours", patch)
    return first, replace(first, name=f"{name} after ours", is_last=True)


def _cache(kind: Any) -> Patch:
    span = {"start_percent": 0.15, "end_percent": 0.95}
    return node(kind, reuse_threshold=0.2, **span, verbose=False)


def _skipping(start: float, end: float) -> Situation:
    layers = {"double_layers": "0", "single_layers": "1", "scale": 3.0}
    patch = node(SkipLayerGuidanceDiT, **layers, start_percent=start, end_percent=end)
    return Situation(f"SkipLayerGuidance {start:g} to {end:g}", patch)


def _second_prompt(start: float, end: float) -> Situation:
    prompts = partial(_with_second, start_percent=start, end_percent=end)
    return Situation(f"second prompt {start:g} to {end:g}", prompts=prompts)


def _control(start: float, end: float) -> Situation:
    return Situation(f"ControlNet {start:g} to {end:g}", prompts=partial(_controlled, start, end))


_override = node(CFGOverride, cfg=1.0, start_percent=0.2, end_percent=0.8)

_ALL = (
    Situation("plain"),
    _second_prompt(0.2, 0.8),
    _second_prompt(0.0, 0.5),
    _second_prompt(0.5, 1.0),
    *_in_both_orders("CFGOverride 0.2 to 0.8", _override),
    Situation("CFGZeroStar", node(CFGZeroStar)),
    Situation("CFGNorm", node(CFGNorm, strength=1.0)),
    Situation("CFGNorm before guidance", node(CFGNorm, strength=1.0, pre_cfg=True)),
    Situation("APG", node(APG, eta=1.0, norm_threshold=5.0, momentum=0.0)),
    Situation("APG with momentum", node(APG, eta=0.0, norm_threshold=15.0, momentum=-0.5)),
    Situation("RescaleCFG", node(RescaleCFG, multiplier=0.7)),
    Situation("TCFG", node(TCFG)),
    _skipping(0.01, 0.15),
    _skipping(0.2, 0.6),
    Situation("PAG", node(PerturbedAttentionGuidance, scale=3.0)),
    Situation("NAG", node(NAGuidance, nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5)),
    Situation("prompts in two calls", prompts=_in_two_calls),
    Situation("batch that splits and joins", is_short=lambda step: step % 3 == 1, batch=2),
    _windows("standard_static"),
    _windows("standard_static", freenoise=True),
    _windows("standard_uniform"),
    _windows("looped_uniform"),
    _windows("looped_uniform", closed_loop=True),
    _windows("batched"),
    Situation("area", prompts=_in_area),
    Situation("mask", prompts=_in_mask),
    Situation("inpainting", begins=True, masked=True),
    Situation(
        "DifferentialDiffusion",
        node(DifferentialDiffusion, strength=1.0),
        begins=True,
        masked=True,
    ),
    _control(0.0, 0.5),
    _control(0.2, 0.8),
    Situation("hooked LoRA", prompts=_hooked),
    Situation(
        "hooked LoRA by keyframes",
        prompts=lambda subject: _hooked(subject, (0.0, 1.0), (0.4, 0.3), (0.7, 0.0)),
    ),
    *_in_both_orders("EasyCache", _cache(EasyCacheNode)),
    *_in_both_orders("LazyCache", _cache(LazyCacheNode)),
    Situation("split sampling", passes=_split),
    Situation("restart schedule", passes=_restarting),
    Situation("inversion and back", passes=_inverted, begins=True),
    Situation("second pass, denoise 0.5", passes=_second_pass, begins=True),
    Situation("lying sigma", wrap=_lying),
)

SITUATIONS = {each.name: each for each in _ALL}
"""All situations by name."""
