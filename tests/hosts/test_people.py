"""Small graphs like those that people share, on the real server, with the node in each place."""

import pytest
from test_server import node, patch, txt2img

from tome_nodes import reasons


def trained(checkpointing, **inputs):
    graph = txt2img(nodes={"tome": patch(**inputs)})
    picture = node("EmptyImage", width=256, height=256, batch_size=1, color=0x806040)
    encoded = node("VAEEncode", pixels=["picture", 0], vae=["loader", 2])
    train = node(
        "TrainLoraNode",
        **{"model": ["tome", 0], "latents": ["encoded", 0], "positive": ["positive", 0]},
        **{"batch_size": 1, "grad_accumulation_steps": 1, "steps": 1, "learning_rate": 5e-4},
        **{"rank": 2, "optimizer": "SGD", "loss_function": "MSE", "seed": 0},
        **{"training_dtype": "fp32", "lora_dtype": "fp32", "quantized_backward": False},
        **{"algorithm": "LoRA", "gradient_checkpointing": checkpointing, "checkpoint_depth": 1},
        **{"offloading": False, "existing_lora": "[None]", "bucket_mode": False},
        bypass_mode=False,
    )
    shown = node("PreviewAny", source=["train", 1])
    kept = {name: graph[name] for name in ("loader", "positive", "tome")}
    return kept | {"picture": picture, "encoded": encoded, "train": train, "shown": shown}


@pytest.mark.parametrize("preset", ["balanced", "fast"])
def test_a_patched_model_is_trained_and_unmerged_where_gradients_need_it_to_run_again(
    server, preset
):
    def losses(**inputs):
        read = len(server.log)
        entry = server.run(trained(**inputs))
        return entry["outputs"]["shown"]["text"], server.log[read:]

    plain, log = losses(checkpointing=True, ratio=0.0)
    found, log = losses(checkpointing=True, preset=preset)
    assert found == plain and f"nothing merged: {reasons.RECOMPUTED}" in log
    found, log = losses(checkpointing=False, preset=preset)
    assert found != plain and "TrainLoraNode (node train): merged 6/6 blocks" in log
