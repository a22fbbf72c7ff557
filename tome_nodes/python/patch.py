"""The two functions of the Python interface: make a model faster, and undo that."""

import sys
from inspect import signature
from typing import Any, TypeVar

from ..settings.config import OPTIONS, ToMeConfig
from ..settings.presets import CUSTOM, settings_of

Model = TypeVar("Model")

# tomesd has no such options; with these values, ours do what it does.
_AS_TOMESD = {"min_tokens": 1, "proportional_attn": False}


def apply_patch(
    model: Model,
    ratio: float = 0.5,
    max_downsample: int | str = 1,
    sx: int = 2,
    sy: int = 2,
    use_rand: bool = True,
    merge_attn: bool = True,
    merge_crossattn: bool = False,
    merge_mlp: bool = False,
    *,
    preset: str = CUSTOM,
    **options: Any,
) -> Model:
    """Make a UNet merge tokens and skip steps, or forecast steps of a transformer, from now on.

    The arguments up to ``merge_mlp`` have the names, order, defaults and meaning of ``tomesd``
    0.1.3, the reference code of arXiv 2303.17604. So a script written for tomesd runs with
    ``import tome_nodes as tomesd``. Applying again replaces all settings. The global random
    generators are not touched.

    Args:
        model: a diffusers pipeline, with a transformer or a ``UNet2DConditionModel``, such a UNet,
            a latent-diffusion model (with a UNet at ``model.model.diffusion_model``), or its UNet,
            compiled or not. Its input is of any batch, size, dtype and device. It is changed in
            place.
        ratio: share of the tokens of a feature map to merge away, 0 to 0.95.
        max_downsample: merge feature maps at most this many times smaller than the latent: 1, 2, 4
            or 8. ``"auto"`` takes the shallowest level with attention; in scope ``stack``, the
            level with most blocks. In SDXL the shallowest is 2, so 1 merges nothing.
        sx: width of a cell in tokens; one token of each cell always stays.
        sy: height of a cell in tokens.
        use_rand: pick the token that stays at random, again at each timestep.
        merge_attn: merge the tokens that enter self-attention.
        merge_crossattn: merge the tokens that enter cross-attention.
        merge_mlp: merge the tokens that enter the feed-forward network.
        preset: one of :data:`tome_nodes.settings.presets.PRESETS`, or ``custom``. A preset decides
            all options except those in :data:`tome_nodes.settings.presets.FREE`; the options that
            it decides must have their defaults here.
        options: the other options of :data:`tome_nodes.settings.config.OPTIONS`, with their
            defaults. Two defaults differ: ``min_tokens`` is 1 and ``proportional_attn`` is off. As
            in tomesd, feature maps of any size then merge, and a merged key weighs as one token.
            In a UNet, percents and the change to ``ratio_end`` follow the noise levels of training,
            which its timestep counts down. With ``forecast``, some of its steps are shallow. A
            transformer needs ``forecast``, by itself or from the preset. Beside it, only ``ratio``
            and the percents count, as shares of its pipeline's steps.

    Returns:
        The same model.

    Raises:
        TypeError: the model is none of these, or an option is unknown or has the wrong type.
        ValueError: an option is out of range or has no effect under the preset, or a
            transformer is not to be forecast, or is without its pipeline. The model is not changed.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise TypeError(
            f"apply_patch has no option {', '.join(unknown)}; it has {', '.join(OPTIONS)}, preset"
        )
    given = {
        "ratio": ratio,
        "max_downsample": max_downsample,
        "sx": sx,
        "sy": sy,
        "use_rand": use_rand,
        "merge_attn": merge_attn,
        "merge_crossattn": merge_crossattn,
        "merge_mlp": merge_mlp,
        **_AS_TOMESD,
        **options,
    }
    config = ToMeConfig(**settings_of(preset, given, _DEFAULTS))
    from .patched_model import NetworkPatch

    networks = _networks_of(model)
    for network, context, host in networks:
        host.check(network, config, context)
    for network, context, host in networks:
        NetworkPatch(config, host, context).attach(network)
    return model


_DEFAULTS = {
    **{name: option.default for name, option in OPTIONS.items()},
    **_AS_TOMESD,
    **{name: argument.default for name, argument in signature(apply_patch).parameters.items()},
}


def remove_patch(model: Model) -> Model:
    """Make a model as it was before :func:`apply_patch`.

    Args:
        model: as for :func:`apply_patch`, patched or not, or a transformer alone.

    Returns:
        The same model.

    Raises:
        TypeError: the model is of no kind that can be patched.
    """
    from .patched_model import detach

    for network, _, _ in _networks_of(model):
        detach(network)
    return model


def _networks_of(model: object) -> list[tuple[Any, Any, Any]]:
    """The networks of a model to patch, with their contexts (see :meth:`Host.find`) and host."""
    from .ldm import LdmUNets
    from .patched_model import Host

    hosts: list[Host] = [LdmUNets()]
    # A model of diffusers cannot exist before diffusers is imported.
    if "diffusers" in sys.modules:
        from .diffusers_transformers import DiffusersTransformers
        from .diffusers_unets import DiffusersUNets

        hosts = [DiffusersUNets(), DiffusersTransformers(), *hosts]
    for host in hosts:
        if networks := host.find(model):
            return [(network, context, host) for network, context in networks]
    kind = type(model).__name__
    if (unet := getattr(model, "unet", None)) is not None:
        kind += f", whose unet is a {type(unet).__name__}"
    raise TypeError(
        "ToMe needs a diffusers pipeline with a transformer or a UNet2DConditionModel, such a "
        "UNet, or a latent-diffusion model with a UNet at model.model.diffusion_model; this is a "
        f"{kind}"
    )
