"""Pictures with ToMe off and on, side by side, and the seconds that they took.

python3 dev.py bench --picture [--model unet] [--repeats 3]

This writes web/docs/off-and-on.jpg for docs/measured.md and prints a caption. With --model
transformer or video, it writes off-and-on-transformer.jpg or off-and-on-video.jpg for the help
page. The models are the trained ones of `dev.py bench --fidelity`, since random weights paint
noise.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

from PIL import Image, ImageDraw, ImageFont  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.fidelity.judges import SceneJudge, VideoJudge  # noqa: E402
from benchmarks.fidelity.pictures import Judge, PictureJudge  # noqa: E402
from benchmarks.machine import origin  # noqa: E402
from benchmarks.rounds import interleaved  # noqa: E402
from tome_nodes.comfyui.attachment import attach  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import settings_of  # noqa: E402

DOCS = ROOT / "web" / "docs"
KINDS: Mapping[str, tuple[Callable[[], Judge], Sequence[str]]] = {
    "unet": (partial(PictureJudge, 12), ("balanced 0.6", "fast 0.6")),
    "transformer": (partial(SceneJudge, 8), ("balanced 0.75", "5 steps")),
    "video": (partial(VideoJudge, 8), ("balanced 0.6", "6 steps")),
}
"""Judges, and the columns beside the plain pictures: a preset and its ratio, or so many steps."""

OFF = "off"
SHOWN = (0, -1)
"""Which pictures are shown; the seconds are for all of them together."""
FRAMES = (2, 6)
"""Which frames of a video are shown."""
SIDE, MARGIN, CAPTION = 320, 12, 52
PAPER, INK, MUTED = "#16181d", "#eef0f4", "#969ca8"


def main() -> None:
    """Paint, time, draw."""
    arguments = _arguments()
    model = arguments.model
    make, compared = KINDS[model]
    judge = make()
    runs: dict[str, tuple[Any, int | None]] = {OFF: (judge.model, None)}
    for column in compared:
        first, second = column.split()
        if second == "steps":
            runs[column] = judge.model, int(first)
        else:
            config = ToMeConfig(**settings_of(first, {"ratio": float(second)}))
            runs[f"preset {first}, ratio {second}"] = attach(judge.model, config), None
    painted: dict[str, Tensor] = {}

    def paint(name: str) -> float:
        start = time.perf_counter()
        painted[name] = judge.pictures(*runs[name])
        return time.perf_counter() - start

    taken = interleaved({name: partial(paint, name) for name in runs}, arguments.repeats)
    # The fastest run counts, as in the demo: other processes can only add to a time.
    fastest = {name: min(seconds) for name, seconds in taken.items()}
    columns = {name: [_pixels(each) for each in _shown(painted[name])] for name in runs}
    file = "off-and-on.jpg" if model == "unet" else f"off-and-on-{model}.jpg"
    _sheet(columns, fastest).save(DOCS / file, quality=90)
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
    parser.add_argument("--model", choices=KINDS, default="unet")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    return parser.parse_args()


def _shown(pictures: Tensor) -> list[Tensor]:
    """The pictures to show; of videos, some frames of the first."""
    if pictures.ndim == 4:
        return [pictures[row] for row in SHOWN]
    return [pictures[0, :, frame] for frame in FRAMES]


def _pixels(picture: Tensor) -> Image.Image:
    array = (picture.permute(1, 2, 0).numpy() * 255).round().astype("uint8")
    return Image.fromarray(array).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def _sheet(
    columns: Mapping[str, Sequence[Image.Image]], seconds: Mapping[str, float]
) -> Image.Image:
    """One column of pictures for each model, under its name and seconds."""
    rows = len(next(iter(columns.values())))
    size = MARGIN + len(columns) * (SIDE + MARGIN), CAPTION + rows * (SIDE + MARGIN)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    large, small = ImageFont.load_default(18), ImageFont.load_default(16)
    for column, (name, pictures) in enumerate(columns.items()):
        x = MARGIN + column * (SIDE + MARGIN)
        title, text = "ToMe off", f"{seconds[name]:.1f} s"
        if name != OFF:
            title = name.capitalize()
            text += f", {seconds[OFF] / seconds[name]:.2f} times faster"
        draw.text((x, 5), title, INK, large)
        draw.text((x, 27), text, MUTED, small)
        for row, picture in enumerate(pictures):
            sheet.paste(picture, (x, CAPTION + row * (SIDE + MARGIN)))
    return sheet


if __name__ == "__main__":
    main()
