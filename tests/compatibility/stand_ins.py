"""What nodes of other packs do to a model, for tests beside them.

Each is our own, written after what the node does to the model object: which wrapper, attribute or
option it sets, whether it calls what was there before, and when it skips what. Thresholds are such
that a run of four steps skips something. The sources are named in :mod:`.neighbours`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from comfy.ldm.flux.layers import timestep_embedding
from comfy.ldm.modules.attention import attention_basic
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel, forward_timestep_embed
from comfy.ldm.wan.model import sinusoidal_embedding_1d
from comfy.model_patcher import ModelPatcher
from comfy_api.torch_helpers import set_torch_compile_wrapper
from torch import Tensor, nn

_OVERRIDE = "optimized_attention_override"


def attend_in_low_precision(model: ModelPatcher, kind: str) -> ModelPatcher:
    """An attention override that ignores the function it is given, for one in low precision."""

    def override(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        q, k, v, *rest = args
        q, k, v = (x.bfloat16().to(x.dtype) for x in (q, k, v))
        return attention_basic.__wrapped__(q, k, v, *rest, **kwargs)

    clone = model.clone()
    clone.model_options["transformer_options"][_OVERRIDE] = override
    return clone


def attend_or_pass_on(model: ModelPatcher, kind: str) -> ModelPatcher:
    """An attention override that attends itself, or calls what it is given where it cannot.

    It takes no mask, so it passes merged keys on that are weighed by one.
    """
    clone = model.clone()
    options = clone.model_options["transformer_options"]
    before = options.get(_OVERRIDE)

    def override(func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("mask") is not None or q.shape[-2] != k.shape[-2]:
            passed = func if before is None else partial(before, func)
            return passed(q, k, v, *args, **kwargs)
        return attention_basic.__wrapped__(q, k, v, *args, **kwargs)

    options[_OVERRIDE] = override
    return clone


_BLOCKS = (
    *("double_blocks", "single_blocks", "layers", "transformer_blocks", "blocks"),
    *("visual_transformer_blocks", "text_transformer_blocks"),
)
"""The attributes of a model whose blocks are compiled one by one."""


def compile_blocks(model: ModelPatcher, kind: str) -> ModelPatcher:
    """Compiled blocks in place of those of the model; the whole model if it has no known ones."""
    clone = model.clone()
    network = clone.get_model_object("diffusion_model")
    keys = [
        f"diffusion_model.{name}.{index}"
        for name in _BLOCKS
        for index in range(len(getattr(network, name, ())))
    ]
    set_torch_compile_wrapper(clone, backend="eager", keys=keys or ["diffusion_model"])
    return clone


class _Levels:
    """Counts the noise levels of a run, and keeps something for each evaluation at a level."""

    def __init__(self) -> None:
        self.last: float | None = None
        self.level = self.call = 0
        self.kept: dict[tuple[str, int], Tensor] = {}

    def begins(self, t: Tensor) -> None:
        """Another evaluation begins."""
        sigma = float(t.flatten()[0])
        if self.last is None or sigma > self.last:
            self.level, self.call = 0, 0
            self.kept.clear()
        elif sigma < self.last:
            self.level, self.call = self.level + 1, 0
        else:
            self.call += 1
        self.last = sigma

    def before(self, name: str, like: Tensor) -> Tensor | None:
        """What was kept for an evaluation like this one, if it is of this shape."""
        kept = self.kept.get((name, self.call))
        return kept if kept is not None and kept.shape == like.shape else None

    def keep(self, name: str, value: Tensor) -> None:
        self.kept[name, self.call] = value


def _in_each_evaluation(
    model: ModelPatcher, evaluate: Callable[[Callable[..., Tensor], dict[str, Any]], Tensor]
) -> ModelPatcher:
    clone = model.clone()
    clone.set_model_unet_function_wrapper(evaluate)
    return clone


def forecast(model: ModelPatcher, kind: str) -> ModelPatcher:
    """The output of some steps is a straight line through the last two, without the model."""
    levels = _Levels()

    def evaluate(apply: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        x, t = arguments["input"], arguments["timestep"]
        levels.begins(t)
        first, last = levels.before("first", x), levels.before("last", x)
        if levels.level == 2 and first is not None and last is not None:
            return 2 * last - first
        out = apply(x, t, **arguments["c"])
        if last is not None:
            levels.keep("first", last)
        levels.keep("last", out)
        return out

    return _in_each_evaluation(model, evaluate)


def tile(model: ModelPatcher, kind: str) -> ModelPatcher:
    """Each half of the picture is evaluated on its own."""

    def evaluate(apply: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        x, t, conditions = arguments["input"], arguments["timestep"], arguments["c"]
        tiles = x.split(x.shape[-1] // 2, dim=-1)
        return torch.cat([apply(each, t, **conditions) for each in tiles], -1)

    return _in_each_evaluation(model, evaluate)


def add_attention(model: ModelPatcher, kind: str) -> ModelPatcher:
    """Cross-attention of every block replaced by itself and another to a picture."""
    random = torch.Generator().manual_seed(0)
    picture = torch.randn(1, 4, 1024, generator=random)

    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        heads = options["n_heads"]
        own = picture[..., : q.shape[2]].expand(len(q), -1, -1).to(q)
        return attention_basic(q, k, v, heads) + 0.5 * attention_basic(q, own, own, heads)

    clone = model.clone()
    for place, number in (("input", 12), ("middle", 1), ("output", 12)):
        for block in range(number):
            clone.set_model_attn2_replace(attend, place, block)
    return clone


def patch_after_blocks(model: ModelPatcher, kind: str) -> ModelPatcher:
    """A patch that changes the picture's tokens after each block."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        picture = arguments["img"]
        ramp = torch.linspace(0.5, 1.5, picture.shape[1])[None, :, None]
        return arguments | {"img": picture * ramp.to(picture)}

    clone = model.clone()
    clone.set_model_double_block_patch(change)
    return clone


def cache_by_first_block(model: ModelPatcher, kind: str) -> ModelPatcher:
    """Where the first block changes its tokens like in the last step, the others are skipped.

    A UNet and Flux get another forward for each evaluation, other models one module in place of all
    their blocks.
    """
    network = model.get_model_object("diffusion_model")
    levels = _Levels()
    if isinstance(network, UNetModel):
        return _with_replaced(model, levels, "_forward", _unet_forward(network, levels))
    if kind == "flux":
        forward = _flux_forward(network, levels, by_first_block=True)
        return _with_replaced(model, levels, "forward_orig", forward)
    names = ("transformer_blocks", "joint_blocks", "blocks", "layers")
    name = next(name for name in names if hasattr(network, name))
    cached = _CachedBlocks(getattr(network, name), levels, _STATE.get(kind, (0,)))
    return _with_replaced(model, levels, name, nn.ModuleList([cached]))


def _with_replaced(model: ModelPatcher, levels: _Levels, name: str, value: Any) -> ModelPatcher:
    """An attribute of the network replaced in each evaluation."""
    network = model.get_model_object("diffusion_model")

    def evaluate(apply: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        levels.begins(arguments["timestep"])
        with mock.patch.object(network, name, value):
            return apply(arguments["input"], arguments["timestep"], **arguments["c"])

    return _in_each_evaluation(model, evaluate)


def _is_alike(levels: _Levels, now: Tensor) -> bool:
    """Whether something changed little since the last level; what is given is kept for the next."""
    before = levels.before("sign", now)
    levels.keep("sign", now)
    return before is not None and bool((now - before).abs().mean() < before.abs().mean())


def _skipping(
    levels: _Levels, sign: Tensor, start: Tensor, rest: Callable[[Tensor], Tensor]
) -> Tensor:
    """The ``rest`` of a model; where a sign is alike, the change that it made when it last ran."""
    change = levels.before("change", start)
    if _is_alike(levels, sign) and change is not None:
        return start + change
    out = rest(start)
    levels.keep("change", out - start)
    return out


_STATE: Mapping[str, tuple[int | str, ...]] = {
    "sd3": (0, 1),
    "qwen_image": ("encoder_hidden_states", "hidden_states"),
}
"""The arguments of a block that the next one gets from it, the picture last; else the first one."""


class _CachedBlocks(nn.Module):
    """One module that runs many blocks, or only the first of them.

    Args:
        blocks: those of a model.
        levels: those of a run.
        places: the arguments of a block that the next one gets from it, the picture last.
    """

    def __init__(self, blocks: nn.ModuleList, levels: _Levels, places: tuple[int | str, ...]):
        super().__init__()
        self.blocks = blocks
        self._levels = levels
        self._places = places

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments: dict[Any, Any] = dict(enumerate(args)) | kwargs

        def run(block: nn.Module) -> None:
            out = block(
                *(arguments[index] for index in range(len(args))),
                **{name: arguments[name] for name in kwargs},
            )
            state = out if isinstance(out, tuple) else (out,)
            arguments.update(zip(self._places, state, strict=True))

        def rest(start: Tensor) -> Tensor:
            for block in self.blocks[1:]:
                run(block)
            return arguments[picture]

        picture = self._places[-1]
        before = arguments[picture].clone()
        run(self.blocks[0])
        start = arguments[picture].clone()
        arguments[picture] = _skipping(self._levels, start - before, start, rest)
        state = tuple(arguments[place] for place in self._places)
        return state if len(state) > 1 else state[0]


def _unet_forward(network: Any, levels: _Levels) -> Callable[..., Tensor]:
    """The forward of a UNet that may skip what is between its first block and its output."""

    def forward(
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        options = transformer_options
        options.update(original_shape=list(x.shape), transformer_index=0)
        embedded = network.time_embed(timestep_embedding(timesteps, network.model_channels))
        if y is not None:
            embedded = embedded + network.label_emb(y)

        def run(module: nn.Module, place: str, index: int, h: Tensor, *shape: Any) -> Tensor:
            options["block"] = (place, index)
            return forward_timestep_embed(module, h, embedded, context, options, *shape)

        skips = [run(network.input_blocks[0], "input", 0, x)]
        skips.append(run(network.input_blocks[1], "input", 1, skips[0]))
        start = skips[1]
        sign = start - skips[0]

        def rest(h: Tensor) -> Tensor:
            for index, module in enumerate(network.input_blocks[2:], 2):
                h = run(module, "input", index, h)
                skips.append(h)
            h = run(network.middle_block, "middle", 0, h)
            for index, module in enumerate(network.output_blocks):
                h = torch.cat([h, skips.pop()], 1)
                shape = skips[-1].shape if skips else None
                h = run(module, "output", index, h, shape)
            return h

        return network.out(_skipping(levels, sign, start, rest))

    return forward


def _flux_forward(network: Any, levels: _Levels, by_first_block: bool) -> Callable[..., Tensor]:
    """The forward of Flux that may skip its blocks; they get no transformer options.

    It does so where the first block changes its tokens like in the last step, or else where the
    first block gets alike tokens.
    """

    def forward(
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y: Tensor,
        guidance: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        img, txt = network.img_in(img), network.txt_in(txt)
        vector = network.time_in(timestep_embedding(timesteps, 256)) + network.vector_in(y)
        if guidance is not None:
            vector = vector + network.guidance_in(timestep_embedding(guidance, 256))
        shared = {"vec": vector, "pe": network.pe_embedder(torch.cat((txt_ids, img_ids), 1))}
        done = 0
        sign = img
        if by_first_block:
            before = img.clone()
            img, txt = network.double_blocks[0](img=img, txt=txt, **shared)
            sign, done = img - before, 1

        def rest(img: Tensor) -> Tensor:
            text = txt
            img = img.clone()
            for block in network.double_blocks[done:]:
                img, text = block(img=img, txt=text, **shared)
            both = torch.cat((text, img), 1)
            for block in network.single_blocks:
                both = block(both, **shared)
            return both[:, text.shape[1] :]

        return network.final_layer(_skipping(levels, sign, img, rest), vector)

    return forward


def _wan_forward(network: Any, levels: _Levels) -> Callable[..., Tensor]:
    """The forward of Wan that skips its blocks where the embedded time is alike."""

    def forward(x: Tensor, t: Tensor, context: Tensor, freqs: Any, **_: Any) -> Tensor:
        x = network.patch_embedding(x.float()).to(x.dtype)
        grid = x.shape[2:]
        time = network.time_embedding(sinusoidal_embedding_1d(network.freq_dim, t.flatten()))
        time = time.reshape(len(t), -1, time.shape[-1])
        shared = {
            "e": network.time_projection(time).unflatten(2, (6, network.dim)),
            "freqs": freqs,
            "context": network.text_embedding(context),
        }

        def rest(tokens: Tensor) -> Tensor:
            for block in network.blocks:
                tokens = block(tokens, **shared)
            return tokens

        start = x.flatten(2).transpose(1, 2)
        out = _skipping(levels, time, start, rest)
        return network.unpatchify(network.head(out, time), grid)

    return forward


def cache_by_input(model: ModelPatcher, kind: str) -> ModelPatcher:
    """All blocks are skipped where what enters them is like in the last step.

    Flux and Wan get another forward for each evaluation.
    """
    network = model.get_model_object("diffusion_model")
    levels = _Levels()
    forward = (
        _flux_forward(network, levels, by_first_block=False)
        if kind == "flux"
        else _wan_forward(network, levels)
    )
    return _with_replaced(model, levels, "forward_orig", forward)
