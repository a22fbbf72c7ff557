"""Which diffusion model a file of a template is of, and what the pack does with that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module

FATES = {
    "known": "has a record",
    "asked": "has no record; its pictures are found by asking",
    "untried": "will be asked too, but its class is not known here, so nobody has tried",
    "refused": "does not merge",
}
"""What the pack does with a model, and what that means. The later, the less it serves."""

ANALYSERS = r"sam3|rt_detr|sdpose"
"""Files of models that look at pictures and make none; see :attr:`Family.files`."""


@dataclass(frozen=True)
class Family:
    """Diffusion models of one class.

    Attributes:
        name: what users call them.
        files: a regular expression for the start of their files' names, in any case.
        model_class: their class below ``comfy.ldm``, or None if that is not known.
    """

    name: str
    files: str
    model_class: str | None


FAMILIES = (
    Family("MiniMax H3", r"minimax_h3|.*fasth3", "minimax.model.MiniMaxH3Model"),
    Family(
        "Qwen-Image 2.1", r"qwen_image_2\.1", "qwen_image21.model.QwenImage21Transformer2DModel"
    ),
    Family("Qwen-Image", r"qwen_image|firered", "qwen_image.model.QwenImageTransformer2DModel"),
    Family("LTX-2.5", r"ltx-2\.5", "lightricks.av_model.LTXAVModel"),
    Family("LTX-2", r"ltx-2", "lightricks.av_model.LTXAVModel"),
    Family("LTX-Video", r"ltx-video|ltxv", "lightricks.model.LTXVModel"),
    Family("Z-Image", r"z_image", "lumina.model.NextDiT"),
    Family("Lumina 2", r"lumina|netayume|newbie", "lumina.model.NextDiT"),
    Family("Ming Image", r"ming_image", "lumina.model.NextDiT"),
    Family("Krea 2", r"krea2", "krea2.model.SingleStreamDiT"),
    Family("Wan Animate 2", r"wan_animate_2", "wan.model_animate2.WanAnimate2Model"),
    Family("Wan Animate", r"wan.*animate", "wan.model_animate.AnimateWanModel"),
    Family("SCAIL-2", r"wan.*scail_2", "wan.model.SCAIL2WanModel"),
    Family("SCAIL", r"wan.*scail", "wan.model.SCAILWanModel"),
    Family("Wan VACE", r"wan.*vace", "wan.model.VaceWanModel"),
    Family("Wan Camera", r"wan.*camera", "wan.model.CameraWanModel"),
    Family("Wan S2V", r"wan.*s2v", "wan.model.WanModel_S2V"),
    Family("WanDancer", r"wan.*dancer", "wan.model_wandancer.WanDancerModel"),
    Family("HuMo", r"humo", "wan.model.HumoWanModel"),
    Family("Wan, causal", r"causal_forcing", "wan.ar_model.CausalWanModel"),
    Family("Wan 2.x", r"wan|chrono_edit", "wan.model.WanModel"),
    Family("FLUX 3 Klein", r"flux-?3", None),
    Family("Flux.2", r"flux-?2", "flux.model.Flux"),
    Family("Flux.1", r"flux\.?1", "flux.model.Flux"),
    Family("LongCat-Image", r"longcat", "flux.model.Flux"),
    Family("Ovis-Image", r"ovis", "flux.model.Flux"),
    Family("Chroma Radiance", r"chroma-radiance", "chroma_radiance.model.ChromaRadiance"),
    Family("Chroma", r"chroma", "chroma.model.Chroma"),
    Family("MOSS-Image", r"moss_image", None),
    Family("Fibo 2", r"fibo2", None),
    Family("SeedVR2", r"seedvr2", "seedvr.model.NaDiT"),
    Family("Anima", r"anima", "anima.model.Anima"),
    Family("SD3.5", r"sd3", "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper"),
    Family("HunyuanVideo", r"hunyuan_?video|capybara", "hunyuan_video.model.HunyuanVideo"),
    Family("HiDream-O1", r"hidream_o1", "hidream_o1.model.HiDreamO1Transformer"),
    Family("HiDream", r"hidream", "hidream.model.HiDreamImageTransformer2DModel"),
    Family("Mage-Flow", r"mage_flow", "mage_flow.model.MageFlowTransformer2DModel"),
    Family("CogVideoX", r"cogvideo|void", "cogvideo.model.CogVideoXTransformer3DModel"),
    Family("ERNIE-Image", r"ernie-image", "ernie.model.ErnieImageModel"),
    Family("Ideogram 4", r"ideogram4", "ideogram4.model.Ideogram4Transformer2DModel"),
    Family("Boogu", r"boogu", "boogu.model.BooguTransformer2DModel"),
    Family("Kandinsky 5", r"kandinsky5", "kandinsky5.model.Kandinsky5"),
    Family("Lens", r"lens", "lens.model.LensTransformer2DModel"),
    Family("PixelDiT", r"pixeldit", "pixeldit.model.PixDiT_T2I"),
    Family("PiD", r"pid_", "pixeldit.pid.PidNet"),
    Family("OmniGen 2", r"omnigen2", "omnigen.omnigen2.OmniGen2Transformer2DModel"),
    Family("JoyImage", r"joyai_image", "joyimage.model.JoyImageTransformer3DModel"),
    Family("UNets", r"sd_xl|svd|lotus|v1-5", "modules.diffusionmodules.openaimodel.UNetModel"),
)
"""The first that fits a file is its family. A file that none fits is a family of its own."""


def family_of(file: str) -> Family | None:
    """The family of a model by the name of its file; None if it makes no picture."""
    if re.match(ANALYSERS, file, re.IGNORECASE):
        return None
    fitting = (each for each in FAMILIES if re.match(each.files, file, re.IGNORECASE))
    return next(fitting, Family(file, re.escape(file), None))


def fate_of(family: Family) -> str:
    """What the pack does with a family: a key of FATES. ComfyUI has to be on the path."""
    from torch import nn

    from tome_nodes.comfyui.models import RECORDS
    from tome_nodes.comfyui.models.transformers import REFUSED

    if family.model_class is None:
        return "untried"
    module, _, name = f"comfy.ldm.{family.model_class}".rpartition(".")
    if f"{module}.{name}" in REFUSED:
        return "refused"
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        # A class of a later ComfyUI.
        kind = type(name, (nn.Module,), {"__module__": module})
    # Records look at the class alone, so the model needs no weights.
    model = kind.__new__(kind)
    return "known" if any(record.matches(model) for record in RECORDS) else "asked"
