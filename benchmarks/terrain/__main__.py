"""Compare skipped steps with fewer steps, on a UNet for terrain that others trained.

python3 dev.py bench --terrain [euler | dpmpp_2m] [--version 0.4.1]

It takes ten minutes on one thread. In 8 of 20 steps, the whole network runs. In each of the others,
it runs either in part or not at all. In part, only the blocks outside of a cut run, and what comes
up from inside continues the line through its last two values over the logarithm of signal to noise.
Otherwise, the answer itself continues such a line.
"""

import argparse
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.fidelity.shares import error_at
from benchmarks.terrain.network import SIDE, SIGMA_MAX, SIGMA_MIN, Terrain, load
from benchmarks.wheels import wheel
from tome_nodes.skipping.steps import log_snr

PACKAGE = "adaptive_terrain_diffusion"
VERSIONS = {
    "0.4.1": "ae45819f1be906e6783999caf8f4d648f81007a86914f6a5d216d4fc6cb83328",
    "0.4.2": "dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d",
}
"""The versions of the package that were tried, with the digests of their wheels."""

STEPS = 20
WHOLE = (0, 1, 2, 4, 6, 9, 12, 16)
"""The steps that run the whole network."""
SHARED = 3
"""The number of steps at the start that are whole, and so the same for each damping."""
FEWER = (6, 8, 10, 12, 14, 16)
CUTS = (0, 1, 2)
DAMPINGS = (0.0, 0.5, 1.0)
SAMPLES = 8

Answer = Callable[[Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
"""From a map, its noise level and a stand-in: the map without noise, and what came up at a cut."""


@dataclass(frozen=True)
class State:
    """Where a run is: the map, the last noise level and answer, and what came up in the last two
    whole steps, with the logarithm of signal to noise."""

    x: Tensor
    sigma: float = 0.0
    answer: Tensor | None = None
    kept: list[tuple[float, Tensor]] = field(default_factory=list)


def schedule(steps: int, rho: float = 7) -> list[float]:
    """The noise levels of Karras et al., and 0."""
    top, bottom = SIGMA_MAX ** (1 / rho), SIGMA_MIN ** (1 / rho)
    return [*((top + i / (steps - 1) * (bottom - top)) ** rho for i in range(steps)), 0.0]


def euler(state: State, sigma: float, to: float, answer: Tensor) -> Tensor:
    """The map after a step of Euler's method."""
    return answer + (state.x - answer) * (to / sigma)


def dpm(state: State, sigma: float, to: float, answer: Tensor) -> Tensor:
    """The map after a step of DPM-Solver++(2M)."""
    if state.answer is not None and to:
        ratio = math.log(sigma / to) / math.log(state.sigma / sigma)
        answer = answer + (answer - state.answer) * ratio / 2
    return answer + (state.x - answer) * (to / sigma)


def advance(
    state: State,
    ask: Answer,
    method: Callable[[State, float, float, Tensor], Tensor],
    sigmas: Sequence[float],
    steps: Iterable[int],
    whole: Collection[int],
    damping: float = 0.0,
) -> State:
    """The state after some steps."""
    for step in steps:
        sigma = sigmas[step]
        place = log_snr(sigma, is_flow=False)
        if step in whole:
            answer, deep = ask(state.x, sigma, None)
            kept = [*state.kept, (place, deep)][-2:]
        else:
            kept = state.kept
            (before, old), (last, new) = kept
            reach = damping * (place - last) / (last - before)
            answer, _ = ask(state.x, sigma, new + (new - old) * reach)
        state = State(method(state, sigma, sigmas[step + 1], answer), sigma, answer, kept)
    return state


METHODS = {"euler": euler, "dpmpp_2m": dpm}


def work_outside(model: Terrain) -> list[float]:
    """The share of the work that is outside of each cut."""
    x, one = torch.zeros(1, 1, SIDE, SIDE), torch.ones(1)
    counts = []
    for cut in CUTS:
        _, deep = model(x, one, one, cut=cut)
        for stand_in in (None, deep):
            with FlopCounterMode(display=False) as counter:
                model(x, one, one, cut=cut, deep=stand_in)
            counts.append(counter.get_total_flops())
    return [outer / full for full, outer in zip(counts[::2], counts[1::2], strict=True)]


def asking(model: Terrain, cut: int | None) -> Answer:
    """The network with a cut; without a cut, a stand-in takes the place of the whole answer."""
    difficulty = torch.linspace(0, 1, SAMPLES)

    def ask(x: Tensor, sigma: float, deep: Tensor | None) -> tuple[Tensor, Tensor]:
        if cut is None and deep is not None:
            return deep, deep
        sigmas = torch.full((SAMPLES,), sigma)
        answer, deep = model(x, sigmas, difficulty, cut=cut or 0, deep=deep)
        return answer, answer if cut is None else deep

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev.py bench --terrain", description=__doc__)
    parser.add_argument("sampler", choices=METHODS, nargs="?", default="euler")
    parser.add_argument("--version", choices=VERSIONS, default="0.4.1", help="of the package")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    method = METHODS[arguments.sampler]
    model = load(wheel(PACKAGE, arguments.version, VERSIONS[arguments.version]))
    outside = work_outside(model)
    model = model.to(memory_format=torch.channels_last)
    generators = (torch.Generator().manual_seed(seed) for seed in range(SAMPLES))
    noise = torch.stack([torch.randn(1, SIDE, SIDE, generator=each) for each in generators])
    first = State(noise * SIGMA_MAX)

    def plain(steps: int) -> Tensor:
        whole = range(steps)
        return advance(first, asking(model, 0), method, schedule(steps), whole, whole).x

    wanted = plain(STEPS)

    def error(x: Tensor) -> float:
        """The median over the samples, as a share of the deviation of a map."""
        squares = (x - wanted).square().mean((1, 2, 3)) / wanted.var((1, 2, 3))
        return median(squares.sqrt().tolist())

    print(f"{'':28}{'work':>7}{'error':>9}{'over fewer steps':>18}")
    fewer = []
    for steps in FEWER:
        fewer.append((steps / STEPS, error(plain(steps))))
        print(f"{f'{steps} steps':28}{fewer[-1][0]:7.3f}{fewer[-1][1]:9.4f}", flush=True)
    for cut in (None, *CUTS):
        ask, sigmas = asking(model, cut), schedule(STEPS)
        begun = advance(first, ask, method, sigmas, range(SHARED), WHOLE)
        share = 0.0 if cut is None else outside[cut]
        work = (len(WHOLE) + (STEPS - len(WHOLE)) * share) / STEPS
        for damping in DAMPINGS:
            own = error(advance(begun, ask, method, sigmas, range(SHARED, STEPS), WHOLE, damping).x)
            name = "answer forecast" if cut is None else f"shallow, cut {cut}"
            ratio = own / (error_at(work, fewer) or math.nan)
            label = f"{name}, damping {damping:g}"
            print(f"{label:28}{work:7.3f}{own:9.4f}{ratio:18.2f}", flush=True)


if __name__ == "__main__":
    main()
