"""A picture is found where it stands in a sequence, and nowhere else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tome_nodes.merging.layout import Grid, Span
from tome_nodes.merging.picture_search import (
    changed,
    changes,
    fingerprints,
    most_changed,
    probed_pixels,
    span_of,
)

sizes = st.tuples(st.integers(1, 5), st.integers(6, 12), st.integers(6, 12))


def tokens_of(latent, patch):
    """The patches of a latent ``[batch, channels, frames, height, width]``, one by one."""
    frames, height, width = latent.shape[2:]
    return torch.stack(
        [
            latent[:, :, frame, row : row + patch, column : column + patch].flatten(1)
            for frame in range(frames)
            for row in range(0, height, patch)
            for column in range(0, width, patch)
        ],
        1,
    )


def sequence(latent, patch, before, behind, order=None):
    """The tokens of a picture between others, as ``[batch, tokens, channels]``."""
    picture = tokens_of(latent, patch)
    if order is not None:
        picture = picture[:, order]
    others = torch.linspace(-1, 1, picture.shape[2])
    return torch.cat(
        [others.expand(len(picture), before, -1), picture, others.expand(len(picture), behind, -1)],
        1,
    )


def change_of(latent, *where):
    return changes(
        fingerprints(sequence(latent, *where)), fingerprints(sequence(changed(latent), *where))
    )


def latent_of(size, patch, batch=2):
    frames, height, width = size
    generator = torch.Generator().manual_seed(height * 100 + width)
    return torch.randn(batch, 4, frames, height * patch, width * patch, generator=generator)


@given(sizes, st.sampled_from([1, 2, 4, 8]), st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=60)
def test_a_picture_in_rows_is_found(size, patch, before, behind):
    latent = latent_of(size, patch)
    frames, height, width = size
    expected = Span(before, Grid(height, width, frames))
    change = change_of(latent, patch, before, behind)
    assert span_of(change, tuple(latent.shape[2:])) == expected


@given(sizes, st.sampled_from([1, 2, 4]), st.sampled_from(["columns", "back", "windows", "any"]))
@settings(max_examples=60)
def test_a_picture_in_another_order_is_not(size, patch, kind):
    frames, height, width = size
    places = torch.arange(frames * height * width).view(frames, height, width)
    if kind == "columns":
        order = places.transpose(1, 2).flatten()
    elif kind == "back":
        order = places.flatten().flip(0)
    elif kind == "windows":
        order = torch.cat([places[:, :, :3].flatten(), places[:, :, 3:].flatten()])
    else:
        order = torch.randperm(places.numel(), generator=torch.Generator().manual_seed(0))
    latent = latent_of(size, patch)
    assert span_of(change_of(latent, patch, 5, 5, order), tuple(latent.shape[2:])) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_finds_the_same(dtype):
    latent = latent_of((3, 8, 10), 2)
    parts = [fingerprints(sequence(each, 2, 7, 3).to(dtype)) for each in (latent, changed(latent))]
    assert span_of(changes(*parts), (3, 16, 20)) == Span(7, Grid(8, 10, 3))


def test_what_overflows_has_changed_most():
    before = torch.zeros(1, 3, 8)
    after = torch.tensor([0.5, float("nan"), float("inf")])[None, :, None].expand(1, 3, 8)
    assert changes(before, after).tolist() == [[4.0, 40.0, 40.0]]


def test_a_latent_of_one_value_is_changed_too():
    latent = torch.full((1, 4, 16, 16), 3.0)
    assert (changed(latent) != latent).all()
    assert latent.eq(3.0).all()


@given(st.tuples(st.integers(1, 9), st.integers(1, 300), st.integers(1, 300)))
def test_probed_pixels_are_in_the_latent(sides):
    pixels = probed_pixels(sides)
    assert pixels == probed_pixels(sides)
    assert all(
        0 <= place < side for pixel in pixels for place, side in zip(pixel, sides, strict=True)
    )


def test_the_tokens_with_probed_pixels_change_most():
    latent = latent_of((1, 8, 10), 2, batch=1)
    change = change_of(latent, 2, 0, 0)
    tokens = {(row // 2) * 10 + column // 2 for _, row, column in probed_pixels((1, 16, 20))}
    assert most_changed(change, (1, 16, 20), Grid(8, 10), 1) == sorted(tokens)
    assert most_changed(torch.zeros_like(change), (1, 16, 20), Grid(8, 10), 1) == []
