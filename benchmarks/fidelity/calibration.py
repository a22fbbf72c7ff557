"""What is published of real models, next to what a judge says of the same methods.

A judge may choose a preset only where its order of known methods is that of real models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.fidelity.page import STEPS, Rows, error_at, points
from benchmarks.speed.figures import grid

TEACACHE = "TeaCache 0.2"
"""At the threshold of the claims below."""

SHOWN = 20
"""The step count that stands for the 25 to 50 of what is published."""


@dataclass(frozen=True)
class Claim:
    """Something published, and how a judge is asked for it.

    Attributes:
        text: what is published.
        source: where.
        judge: whose rows answer.
        steps: of which step count.
        answer: gives what the judge says in words, and whether that is alike.
    """

    text: str
    source: str
    judge: str
    steps: int
    answer: Callable[[Rows], tuple[str, bool]]


def _forecast_beats_fewer(rows: Rows) -> tuple[str, bool]:
    name = "forecast, more skipped" if "forecast, more skipped" in rows else "forecast"
    return _against_fewer(rows, name)


def _against_fewer(rows: Rows, name: str) -> tuple[str, bool]:
    """Error of a row over that of fewer steps at its time."""
    row = rows[name]
    other = error_at(row["time"], [*points(rows, (STEPS,)).values()])
    if not other:
        return f"skips nothing: {row['evaluations']} evaluations", False
    share = row["error"] / other
    return f"{share:.2f} of the error of fewer steps, at {row['time']:.2f}", share < 1


def _easycache_saves(rows: Rows) -> tuple[str, bool]:
    row = rows["EasyCache 0.2"]
    said = f"{1 / row['time']:.2f} times, {row['psnr']:.1f} dB"
    return said, row["time"] < 0.7 and 20 < row["psnr"] < 35


def _skips_a_quarter(rows: Rows) -> tuple[str, bool]:
    row = rows[TEACACHE]
    skipped = 1 - row["time"]
    said = f"{skipped:.2f} skipped, SSIM {row['ssim']:.2f}"
    return said, 0.15 < skipped < 0.35 and 0.75 < row["ssim"] < 0.95


def _skips_nothing(rows: Rows) -> tuple[str, bool]:
    ran, all_of_them = (rows[name]["evaluations"] for name in (TEACACHE, "plain"))
    return f"{all_of_them - ran} of {all_of_them} skipped", ran == all_of_them


def _queries_hurt_most(rows: Rows) -> tuple[str, bool]:
    names = ("q,k,v 0.5, as the paper", "k,v 0.5, unweighted")
    with_queries, without = (rows[name]["error"] for name in names)
    return f"{with_queries / without:.1f} times the error", with_queries > without


CLAIMS = (
    Claim(
        "FLUX.1-dev, 50 steps: forecasting has a better reward than as few steps (TaylorSeer 0.986 "
        "at 0.28 of the time, 34 % of the steps 0.945 at 0.32)",
        "arXiv 2508.16211, in the benchmarks of cache-dit",
        "image",
        SHOWN,
        _forecast_beats_fewer,
    ),
    Claim(
        "Wan 2.1 and HunyuanVideo, 50 steps: EasyCache is 2.5 and 2.2 times faster at 25 and 33 dB",
        "arXiv 2507.02860",
        "image",
        SHOWN,
        _easycache_saves,
    ),
    Claim(
        "FLUX.1-dev, 25 steps: TeaCache skips 6 of them at an SSIM of 0.80 to 0.90",
        "mlx-teacache 0.11",
        "image",
        SHOWN,
        _skips_a_quarter,
    ),
    Claim(
        "FLUX.1-dev, 50 steps: repeating two of three steps has a better reward than as few steps "
        "(FORA 0.978 at 0.35 of the time, 34 % of the steps 0.945 at 0.32)",
        "arXiv 2508.16211, in the benchmarks of cache-dit",
        "image",
        SHOWN,
        lambda rows: _against_fewer(rows, "EasyCache 0.2"),
    ),
    Claim(
        "Video transformers: dropping queries hurts more than dropping as many keys and values",
        "AsymRnR, arXiv 2412.11706",
        "image",
        SHOWN,
        _queries_hurt_most,
    ),
    Claim(
        "FLUX.2 Klein, distilled, in 4 steps: TeaCache skips nothing",
        "mlx-teacache 0.11",
        "few",
        4,
        _skips_nothing,
    ),
    Claim(
        "The same in 8 steps",
        "mlx-teacache 0.11",
        "few",
        8,
        _skips_nothing,
    ),
)


def calibration(result: Mapping[str, Any]) -> str:
    """Each claim, what its judge says, and whether that is alike."""
    lines = []
    for claim in CLAIMS:
        rows = result.get(claim.judge, {}).get(str(claim.steps))
        said, is_alike = claim.answer(rows) if rows else ("not asked", None)
        alike = {True: "yes", False: "no", None: ""}[is_alike]
        lines.append([claim.text, claim.source, f"{claim.judge}, {claim.steps} steps", said, alike])
    return grid(["published", "source", "judge", "says", "alike"], lines)
