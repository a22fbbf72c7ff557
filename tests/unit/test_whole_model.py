"""A latent that merges before a model and after it; the model here is a plain function."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes.merging.layout import Grid, Layout, Span
from tome_nodes.patching.detail_cache import MOVES, Detail
from tome_nodes.patching.engine import make_engine
from tome_nodes.patching.whole_model import WholeModel, latent_of, tokens_of
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy

sides = st.integers(1, 7)


def random_latent(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(height=sides, width=sides, frames=st.integers(0, 5), patch=st.integers(1, 3))
def test_a_latent_is_its_tokens(height, width, frames, patch):
    deep = [] if frames == 0 else [frames]
    latent = random_latent(2, 3, *deep, height, width)
    grid = Grid(-(-height // patch), -(-width // patch), max(1, frames))
    tokens = tokens_of(latent, grid)
    assert tokens.shape[:2] == (2, grid.tokens)
    assert torch.equal(latent_of(tokens, latent.shape, grid), latent)


def test_a_token_has_the_values_of_its_patch():
    latent = random_latent(1, 2, 4, 6)
    tokens = tokens_of(latent, Grid(2, 3))
    for row in range(2):
        for column in range(3):
            patch = latent[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(tokens[0, 3 * row + column], patch.flatten())


class Whole:
    """A model on the tokens of an 8x8 latent that doubles it, and sees its plan."""

    def __init__(self, latent, detail, ratio=0.5, refusal=None):
        self.grid = Grid(8, 8, latent.shape[2] if latent.ndim == 5 else 1)
        config = ToMeConfig(ratio=ratio, strategy="window", min_tokens=1)
        engine = make_engine(config, make_strategy, latent.device, latent.dtype)
        engine.strategy.begin(torch.tensor(1))
        self.calls, self.refusal = [], refusal
        self.model = WholeModel(0, self.grid, ratio, engine, detail)
        self.denoised = self.model.run(latent, self.denoise)

    def denoise(self, latent):
        self.calls.append(latent)
        if self.refusal is not None:
            self.model.refuse(self.refusal)
        elif self.model.plan is not None:
            layout = Layout(self.grid.tokens + 3, (Span(3, self.grid),))
            self.in_sequence, _ = self.model.plan_of(layout, 3, torch.zeros(2, layout.length, 1))
        return 2 * latent

    def means(self, latent):
        """The mean of each slot in place of its tokens, by brute force."""
        tokens, slots = tokens_of(latent, self.grid).double(), self.model.plan.slots()
        means = tokens.clone()
        for sample, of_sample in enumerate(slots):
            for slot in of_sample.unique():
                means[sample, of_sample == slot] = tokens[sample, of_sample == slot].mean(0)
        return latent_of(means.float(), latent.shape, self.grid)


def blurred(latent):
    """The mean of the 3x3 pixels around each pixel, by brute force."""
    height, width = latent.shape[-2:]
    result = torch.zeros_like(latent)
    for row in range(height):
        for column in range(width):
            for down in (-1, 0, 1):
                for across in (-1, 0, 1):
                    y, x = (
                        min(max(row + down, 0), height - 1),
                        min(max(column + across, 0), width - 1),
                    )
                    result[..., row, column] += latent[..., y, x] / 9
    return result


@pytest.mark.parametrize("frames", [[], [2]], ids=["picture", "video"])
def test_tokens_of_a_slot_enter_alike_and_leave_smooth_without_detail(frames):
    latent = random_latent(2, 3, *frames, 8, 8)
    whole = Whole(latent, Detail(is_coarse=True))
    assert whole.model.plan.slot_count == whole.grid.tokens // 2
    (entered,) = whole.calls
    torch.testing.assert_close(entered, whole.means(latent))
    expected = 2 * whole.means(latent)
    torch.testing.assert_close(whole.means(whole.denoised), expected)
    smooth = blurred(expected)
    torch.testing.assert_close(whole.denoised, expected + smooth - whole.means(smooth))


def test_the_plan_in_a_sequence_is_that_of_the_latent_and_keeps_the_rest():
    whole = Whole(random_latent(2, 3, 8, 8), Detail(is_coarse=True))
    assert whole.in_sequence.slot_count == 32 + 3
    slots = whole.in_sequence.slots()
    assert slots[:, :3].tolist() == [[0, 1, 2]] * 2
    assert torch.equal(slots[:, 3:] - 3, whole.model.plan.slots())


def test_detail_of_the_step_on_all_tokens_is_kept():
    latent, detail = random_latent(2, 3, 8, 8), Detail(is_full=True)
    full = Whole(latent, detail)
    assert torch.equal(full.denoised, 2 * latent) and full.model.plan is None
    detail.is_full = False
    later = latent + 0.3 * random_latent(2, 3, 8, 8, seed=1)
    whole = Whole(later, detail)
    kept = full.denoised - whole.means(full.denoised)
    torch.testing.assert_close(whole.denoised, 2 * whole.means(later) + kept)


@pytest.mark.parametrize("other", [slice(None), slice(1)], ids=["all samples", "one of two"])
def test_detail_of_another_place_is_not_added(other):
    detail = Detail(is_full=True)
    latent = random_latent(2, 3, 8, 8)
    Whole(latent, detail)
    detail.is_full = False
    later = latent.clone()
    later[other] = random_latent(2, 3, 8, 8, seed=1)[other]
    whole = Whole(later, detail)
    assert whole.model.failed == MOVES and whole.model.plan is None and len(whole.calls) == 2
    assert torch.equal(whole.denoised, 2 * later)


def test_detail_of_a_nearly_plain_place_belongs():
    detail = Detail(is_full=True)
    full = Whole(1 + 0.01 * random_latent(2, 3, 8, 8), detail)
    detail.is_full = False
    later = Whole(2 + 0.01 * random_latent(2, 3, 8, 8, seed=1), detail)
    assert full.model.failed is None and later.model.failed is None and len(later.calls) == 1


@pytest.mark.parametrize("denoised", [None, torch.ones(2, 3, 4, 4)])
def test_without_detail_of_a_picture_the_model_runs_on_all_tokens(denoised):
    latent = random_latent(2, 3, 8, 8)
    detail = Detail(denoised=denoised, latest=torch.ones(1, 3, 8, 8))
    whole = Whole(latent, detail)
    assert torch.equal(whole.denoised, 2 * latent) and torch.equal(detail.denoised, 2 * latent)


def test_like_neighbours_of_the_latest_latent_merge():
    # The left half is flat, the right half is noise: all merging is on the left.
    latest = random_latent(2, 3, 8, 8)
    latest[..., :4] = 1
    whole = Whole(
        random_latent(2, 3, 8, 8, seed=1), Detail(is_coarse=True, latest=latest), ratio=0.375
    )
    sizes = whole.model.plan.slots().view(2, 8, 8)
    right = sizes[..., 4:].flatten(1)
    assert all(len(of_sample.unique()) == 32 for of_sample in right)


def test_where_no_block_can_merge_the_model_runs_on_its_latent():
    latent, detail = random_latent(2, 3, 8, 8), Detail(is_coarse=True)
    whole = Whole(latent, detail, refusal="that are patched")
    assert whole.model.failed == "that are patched" and len(whole.calls) == 2
    assert torch.equal(whole.calls[-1], latent) and torch.equal(whole.denoised, 2 * latent)
    assert detail.latest is None
