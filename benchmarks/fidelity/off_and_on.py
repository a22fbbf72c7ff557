"""Pictures with ToMe off and on, side by side, and the seconds that they took.

python3 dev.py bench --picture [--model unet] [--repeats 3]

This writes web/docs/off-and-on.jpg for the README, a second pass and what merged in it, and prints
a caption. With --model stickers, transformer or video, it writes off-and-on-stickers.jpg and so on
for the help page. The models are the trained ones of `dev.py bench
--fidelity`, since random weights paint noise.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import numpy as np  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.fidelity.judges import SceneJudge, StickerJudge, VideoJudge  # noqa: E402
from benchmarks.fidelity.pictures import HighResolutionJudge, Judge  # noqa: E402
from benchmarks.machine import origin  # noqa: E402
from benchmarks.rounds import interleaved  # noqa: E402
from tome_nodes.comfyui.attachment import attach, last_run  # noqa: E402
from tome_nodes.report import drawing  # noqa: E402
from tome_nodes.report.recording import Recording  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import settings_of  # noqa: E402

DOCS = ROOT / "web" / "docs"
KINDS: Mapping[str, tuple[Callable[[], Judge], Sequence[str]]] = {
    "unet": (partial(HighResolutionJudge, 8, photo=4), ("fast 0.6",)),
    "stickers": (
        partial(StickerJudge, 20, sampler="dpmpp_2m", pictures=3),
        ("fast 0.6", "8 steps"),
    ),
    "transformer": (partial(SceneJudge, 8), ("balanced 0.75", "5 steps")),
    "video": (partial(VideoJudge, 8), ("balanced 0.6", "6 steps")),
}
"""Judges, and the columns beside the plain pictures: a preset and its ratio, or so many steps."""

OFF, MERGED = "off", "merged"
FRAMES = (2, 6)
"""Which frames of a video are shown."""
TOKENS = 128
"""Tokens along the side of a second pass."""
TOP, LEFT, PART = 44, 24, 40
"""The rows and columns of tokens that are shown enlarged, with what merged in them."""
SIDE, MARGIN, CAPTION = 320, 12, 52
PAPER, INK, MUTED, FRAME = "#16181d", "#eef0f4", "#969ca8", "#f68e3c"


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
            patched = attach(judge.model, config, wants_details=lambda: True)
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
    last = [*runs][-1]
    run = last_run(runs[last][0])
    if run is not None and run.recording is not None and run.counts.merged:
        merged, words = _merged(run.recording, painted[last][0])
        _frame(columns[last][0])
        columns[MERGED] = [merged]
        titles[MERGED] = "What merged in the frame", words
    file = "off-and-on.jpg" if model == "unet" else f"off-and-on-{model}.jpg"
    _sheet(columns, titles).save(DOCS / file, quality=80, optimize=True)
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
    """The first and the last picture; of videos, some frames of the first."""
    if pictures.ndim == 4:
        return [pictures[row] for row in sorted({0, len(pictures) - 1})]
    return [pictures[0, :, frame] for frame in FRAMES]


def _pixels(picture: Tensor) -> Image.Image:
    array = (picture.clamp(0, 1).permute(1, 2, 0).numpy() * 255).round().astype("uint8")
    return Image.fromarray(array).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def _title(name: str, seconds: Mapping[str, float]) -> tuple[str, str]:
    """What stands over a column: its name, and how long it took."""
    if name == OFF:
        return "ToMe off", f"{seconds[OFF]:.1f} s"
    times = seconds[OFF] / seconds[name]
    return name.capitalize(), f"{seconds[name]:.1f} s, {times:.2f} times as fast"


def _merged(recording: Recording, picture: Tensor) -> tuple[Image.Image, str]:
    """What merged in the last step in a part of the largest map, and how much did in all of it."""
    grid = next(iter(recording.levels.values()))
    step = max(step for step, at in recording.slots if at == grid)
    slots = recording.slots[step, grid]
    drawn = drawing.merge_map(slots, picture.permute(1, 2, 0).numpy())
    scale = len(drawn) // grid.height
    part = drawn[TOP * scale : (TOP + PART) * scale, LEFT * scale : (LEFT + PART) * scale]
    words = f"{grid.tokens} tokens in {len(np.unique(slots))} groups"
    return Image.fromarray(part).resize((SIDE, SIDE), Image.Resampling.LANCZOS), words


def _frame(picture: Image.Image) -> None:
    """Frame the part of a picture that is shown enlarged."""
    left, top, part = (each * SIDE / TOKENS for each in (LEFT, TOP, PART))
    box = left, top, left + part, top + part
    ImageDraw.Draw(picture).rectangle(box, outline=FRAME, width=2)


def _sheet(
    columns: Mapping[str, Sequence[Image.Image]], titles: Mapping[str, tuple[str, str]]
) -> Image.Image:
    """One column of pictures under each title."""
    rows = len(next(iter(columns.values())))
    size = MARGIN + len(columns) * (SIDE + MARGIN), CAPTION + rows * (SIDE + MARGIN)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    large, small = ImageFont.load_default(18), ImageFont.load_default(16)
    for column, (name, pictures) in enumerate(columns.items()):
        x = MARGIN + column * (SIDE + MARGIN)
        title, text = titles[name]
        draw.text((x, 5), title, INK, large)
        draw.text((x, 27), text, MUTED, small)
        for row, picture in enumerate(pictures):
            sheet.paste(picture, (x, CAPTION + row * (SIDE + MARGIN)))
    return sheet


if __name__ == "__main__":
    main()
