"""Pictures with ToMe off and on, side by side, and the seconds that they took.

python3 dev.py bench --picture [--model stickers] [--repeats 3]

This writes web/docs/off-and-on-stickers.jpg for the help page and prints a caption; with --model
transformer or video, off-and-on-transformer.jpg and so on. The models are the trained ones of
`dev.py bench --fidelity`, since random weights paint noise. The README's picture is the demo's.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

from comfy.model_patcher import ModelPatcher  # noqa: E402
from PIL import Image  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.fidelity.judges import SceneJudge, StickerJudge, VideoJudge  # noqa: E402
from benchmarks.fidelity.pictures import Judge  # noqa: E402
from benchmarks.machine import origin  # noqa: E402
from benchmarks.rounds import interleaved  # noqa: E402
from benchmarks.sheet import sheet  # noqa: E402
from tome_nodes.comfyui.attachment import attach  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import settings_of  # noqa: E402

DOCS = ROOT / "web" / "docs"
KINDS: Mapping[str, tuple[Callable[[], Judge], Sequence[str]]] = {
    "stickers": (
        partial(StickerJudge, 20, sampler="dpmpp_2m", pictures=3),
        ("fast 0.6", "8 steps"),
    ),
    "transformer": (partial(SceneJudge, 8), ("balanced 0.75", "5 steps")),
    "video": (partial(VideoJudge, 8), ("balanced 0.6", "6 steps")),
}
"""Judges, and the columns beside the plain pictures: a preset and its ratio, or fewer steps."""

OFF = "off"
FRAMES = (2, 6)
"""Which frames of a video are shown."""
SIDE = 320


def main() -> None:
    arguments = _arguments()
    model = arguments.model
    make, compared = KINDS[model]
    judge = make()
    runs: dict[str, tuple[ModelPatcher, int | None]] = {OFF: (judge.model, None)}
    for column in compared:
        first, second = column.split()
        if second == "steps":
            runs[column] = judge.model, int(first)
        else:
            config = ToMeConfig(**settings_of(first, {"ratio": float(second)}))
            patched = attach(judge.model, config)
            runs[f"preset {first}, ratio {second}"] = patched, None
    painted: dict[str, Tensor] = {}

    def paint(name: str) -> float:
        start = time.perf_counter()
        painted[name] = judge.pictures(*runs[name])
        return time.perf_counter() - start

    taken = interleaved({name: partial(paint, name) for name in runs}, arguments.repeats)
    # The fastest run counts: other processes can only add to a time.
    fastest = {name: min(seconds) for name, seconds in taken.items()}
    columns = {name: [_pixels(each) for each in _shown(painted[name])] for name in runs}
    titles = {name: _title(name, fastest) for name in runs}
    sheet(columns, titles).save(DOCS / f"off-and-on-{model}.jpg", quality=80, optimize=True)
    kind = "videos" if model == "video" else "pictures"
    came = origin("cpu", "bench --picture")
    print(
        f"Seconds of {len(painted[OFF])} {kind} in {judge.steps} steps, the fastest of "
        f"{arguments.repeats} runs: "
        + ", ".join(f"{name} {each:.1f}" for name, each in fastest.items())
        + f". `{came['command']}`, {came['machine']['description']}, {came['date']}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --picture", description=__doc__)
    parser.add_argument("--model", choices=KINDS, default="stickers")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    return parser.parse_args()


def _shown(pictures: Tensor) -> list[Tensor]:
    """The first and the last picture; of videos, some frames of the first."""
    if pictures.ndim == 4:
        return [pictures[row] for row in sorted({0, len(pictures) - 1})]
    return [pictures[0, :, frame] for frame in FRAMES]


def _pixels(picture: Tensor) -> Image.Image:
    array = (picture.clamp(0, 1).permute(1, 2, 0).numpy() * 255).round().astype("uint8")
    return Image.fromarray(array).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def _title(name: str, seconds: Mapping[str, float]) -> tuple[str, str]:
    """The lines above a column: its name, and how long it took."""
    if name == OFF:
        return "ToMe off", f"{seconds[OFF]:.1f} s"
    times = seconds[OFF] / seconds[name]
    return name.capitalize(), f"{seconds[name]:.1f} s, {times:.2f} times as fast"


if __name__ == "__main__":
    main()
