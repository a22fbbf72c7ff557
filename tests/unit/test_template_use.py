"""Which share of the use of templates is served, by a small made-up index."""

import pytest

from tools.errors import ToolError
from tools.families import FAMILIES, family_of
from tools.template_use import page, shares_of, uses_of

FATE = {
    "Flux.1": "known",
    "Qwen-Image": "known",
    "Mage-Flow": "asked",
    "FLUX 3 Klein": "untried",
    "SeedVR2": "refused",
}


def fate(family):
    return FATE.get(family.name, "untried")


def loading(*files, folder="diffusion_models"):
    """A workflow that loads models, in a subgraph."""
    models = [{"name": file, "directory": folder} for file in files]
    nodes = [{"type": "UNETLoader", "properties": {"models": models}}]
    return {"nodes": [], "definitions": {"subgraphs": [{"nodes": nodes}]}}


def templates(kind, **uses):
    named = [{"name": name, "usage": number} for name, number in uses.items()]
    return {"type": kind, "templates": named}


INDEX = [
    templates("image", flux=50, mage=20, klein=10, unheard_of=5, api=1000, segment=1000),
    {"type": "image", "templates": [{"name": "unused"}]},
    templates("video", upscaled=10, masked=5),
    templates("audio", song=1000),
    templates("3d", shape=1000),
]
WORKFLOWS = {
    "flux": loading("flux1-dev.safetensors"),
    "mage": loading("Mage_Flow_int8.safetensors"),
    "klein": loading("flux3-image-klein.safetensors"),
    "unheard_of": loading("of_tomorrow.safetensors"),
    "api": loading("flux1-dev.safetensors", folder="loras"),
    "segment": loading("sam3.1_multiplex.safetensors", folder="checkpoints"),
    "unused": loading("qwen_image_fp8.safetensors"),
    "upscaled": loading("flux1-dev.safetensors", "seedvr2_3b.safetensors"),
    "masked": loading("sam3.1_multiplex.safetensors", "flux1-dev.safetensors"),
    "song": loading("of_sound.safetensors"),
    "shape": loading("of_shapes.safetensors"),
}


def test_a_template_counts_for_the_family_that_is_served_least():
    assert [(family.name, uses) for family, uses in uses_of(INDEX, WORKFLOWS, fate)] == [
        ("Flux.1", 50),
        ("Mage-Flow", 20),
        ("FLUX 3 Klein", 10),
        ("of_tomorrow.safetensors", 5),
        ("Qwen-Image", 0),
        ("SeedVR2", 10),
        ("Flux.1", 5),
    ]


def test_the_page_has_both_sums_and_every_family():
    text = page("9.8.7", [*uses_of(INDEX, WORKFLOWS, fate)], fate)
    assert "` 9.8.7, " in text and "100 uses of 7 templates" in text
    assert "known or asked: 75.0 %. With what nobody has tried: 90.0 %" in text
    assert "| Flux.1 | 55 | 55.0 % | known |" in text
    assert "| of_tomorrow.safetensors | 5 | 5.0 % | untried |" in text
    assert text.splitlines()[-1] == (
        "summary: served=0.750 known=0.550 asked=0.200 untried=0.150 refused=0.100"
    )


def test_an_index_without_uses_is_an_error():
    with pytest.raises(ToolError, match="counts no use"):
        shares_of([(family_of("flux1-dev.safetensors"), 0)], fate)


@pytest.mark.parametrize(
    "file, expected",
    [
        ("minimax_h3_ref2va_pruned_int8_convrot.safetensors", "MiniMax H3"),
        ("fastvideo_fasth3_8step_v2_pruned_int8_convrot.safetensors", "MiniMax H3"),
        ("qwen_image_2.1_turbo_int8_convrot.safetensors", "Qwen-Image 2.1"),
        ("qwen_image_2512_fp8_e4m3fn.safetensors", "Qwen-Image"),
        ("FireRed-Image-Edit-1.1-transformer.safetensors", "Qwen-Image"),
        ("ltx-2.5-22b-distilled-transformer-comfy-int8-convrot.safetensors", "LTX-2.5"),
        ("ltx-2.3-22b-dev-fp8.safetensors", "LTX-2"),
        ("ltx-video-2b-v0.9.safetensors", "LTX-Video"),
        ("wan2.1_14B_SCAIL_2_fp16.safetensors", "SCAIL-2"),
        ("wan_animate_2_int8_convrot.safetensors", "Wan Animate 2"),
        ("Wan2_1-I2V-14B-480p_fp8_e4m3fn_scaled_KJ.safetensors", "Wan 2.x"),
        ("causal_forcing-framewise.safetensors", "Wan, causal"),
        ("flux.1-fill-dev-OneReward-transformer_fp8.safetensors", "Flux.1"),
        ("flux-2-klein-base-9b-fp8.safetensors", "Flux.2"),
        ("NetaYumev35_pretrained_all_in_one.safetensors", "Lumina 2"),
        ("chroma-radiance-x0.safetensors", "Chroma Radiance"),
        ("Chroma1-HD-fp8mixed.safetensors", "Chroma"),
        ("hidream_o1_image_bf16.safetensors", "HiDream-O1"),
        ("svd_xt.safetensors", "UNets"),
    ],
)
def test_a_file_is_of_the_first_family_that_fits(file, expected):
    assert family_of(file).name == expected


def test_every_family_has_a_name_of_its_own():
    assert len({each.name for each in FAMILIES}) == len(FAMILIES)
