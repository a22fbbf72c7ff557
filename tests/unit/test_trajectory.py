"""Whether a latent is where the sampler's last steps led."""

import pytest
import torch

from tome_nodes.skipping import trajectory
from tome_nodes.skipping.trajectory import Trajectory, has_memory, jumps, scale_of


def drawn(seed, batch=2, *shape):
    shape = shape or (4, 16, 16)
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def followed(latents, answers, noise=0.0, where=None, is_known=True):
    """What a trajectory says of each latent of a run; None where it knows nothing."""
    watched, said = Trajectory(is_known), []
    for latent, answer in zip(latents, answers, strict=True):
        leads = watched.begin(latent, noise, where)
        said.append(None if leads is None else bool(leads))
        watched.note(answer, where)
    return said


def euler(count=6, noise=0.0, change=None):
    """The latents and answers of a run of Euler's method; ``change`` acts on the fourth latent."""
    latent, latents, answers = 4 * drawn(0), [], []
    for step in range(count):
        if step == 3 and change is not None:
            latent = change(latent)
        answer = drawn(1) + 0.1 * step * drawn(2)
        latents.append(latent)
        answers.append(answer)
        latent = torch.lerp(answer, latent, 0.8) + noise * drawn(10 + step)
    return latents, answers


def test_a_sampler_is_followed_step_by_step():
    assert followed(*euler()) == [None, *[True] * 5]


def test_so_is_one_that_looks_back_or_evaluates_twice():
    latents, answers = euler()
    for step in range(3, 6):
        earlier = zip(latents[step - 3 : step], answers[step - 3 : step], strict=True)
        latents[step] = sum(0.3 * a - 0.2 * b for a, b in earlier)
    assert followed(latents, answers) == [None, *[True] * 5]


@pytest.mark.parametrize(
    "change",
    [
        lambda latent: latent.flip(-1),
        lambda latent: latent.roll(2, -2),
        # A tenth of the picture, in one of two.
        lambda latent: torch.cat(
            [latent[:1], torch.cat([latent[1:, ..., 2:], latent[:1, ..., :2]], -1)]
        ),
        lambda latent: latent + 0.1 * drawn(50),
    ],
    ids=["mirrored", "rolled", "pasted into one", "noise"],
)
def test_a_latent_that_something_else_changed_is_seen_and_the_next_ones_follow(change):
    assert followed(*euler(change=change)) == [None, True, True, False, True, True]


@pytest.mark.parametrize(("noise", "expected"), [(0.0, False), (1.0, True)])
def test_noise_that_a_sampler_adds_belongs_to_it(noise, expected):
    latents, answers = euler()
    latents[3] = latents[3] + drawn(50)
    assert followed(latents, answers, noise)[3] == expected


def test_noise_does_not_hide_a_picture_of_another_place():
    assert followed(*euler(noise=0.3, change=lambda latent: latent.flip(-1)), 0.3)[3] is False


def test_a_latent_is_watched_from_the_second_on():
    latents, answers = euler()
    assert followed([latents[0].flip(-1), *latents[1:]], answers)[1] is False


@pytest.mark.parametrize(
    ("strange", "expected"),
    [
        (range(6), [None, *[True] * 5]),
        # One that follows is enough.
        ((2,), [None, True, False, True, True, True]),
        ((1, 4), [None, True, True, True, False, True]),
    ],
    ids=["all", "the second", "the first and another"],
)
def test_a_method_that_is_not_known_is_judged_by_two_latents(strange, expected):
    latents, answers = euler()
    for step in strange:
        latents[step] = drawn(30 + step)
        if step == 1:
            # The run goes on from there.
            for later in range(2, 6):
                latents[later] = torch.lerp(answers[later - 1], latents[later - 1], 0.8)
    if strange == (1, 4):
        latents[4] = drawn(34)
        latents[5] = torch.lerp(answers[4], latents[4], 0.8)
    assert followed(latents, answers, is_known=False) == expected


def test_what_is_put_in_around_a_mask_does_not_count():
    latents, answers = euler()
    where = torch.zeros(1, 1, 16, 16)
    where[..., 4:] = 1
    around = [torch.where(where.bool(), latent, drawn(seed)) for seed, latent in enumerate(latents)]
    assert followed(around, answers, where=where) == [None, *[True] * 5]
    assert followed([*latents[:2], *around[2:]], answers)[2] is False


def test_a_latent_of_another_size_begins_anew():
    watched = Trajectory()
    assert watched.begin(drawn(0)) is None
    watched.note(drawn(1))
    assert watched.begin(drawn(0, 2, 4, 8, 8)) is None
    watched.note(drawn(1, 2, 4, 8, 8))
    assert watched.begin(drawn(0)) is None


def test_a_part_of_the_numbers_tells_for_all(monkeypatch):
    """However wide a row is."""
    monkeypatch.setattr(trajectory, "_NUMBERS", 64)
    assert followed(*euler()) == [None, *[True] * 5]
    assert followed(*euler(change=lambda latent: latent.flip(-1)))[3] is False
    seen = trajectory._rows(torch.arange(16 * 64.0).view(1, 1, 16, 64))
    assert 50 < seen.numel() < 80 and len({int(each) % 64 for each in seen[0]}) > 40


def test_nothing_is_kept_of_gradients_and_nothing_changes_with_what_was_given():
    latent, answer = drawn(0).requires_grad_(), drawn(1).requires_grad_()
    watched = Trajectory()
    watched.begin(latent)
    watched.note(answer * 2)
    kept = [each.clone() for each in watched._kept[-1]]
    assert not any(each.requires_grad for each in watched._kept[-1])
    with torch.no_grad():
        latent += 1
    assert all(map(torch.equal, kept, watched._kept[-1]))


CONDITIONS = [
    [drawn(1) + 0.1 * step * drawn(2), drawn(3) + 0.1 * step * drawn(4)] for step in (0, 1)
]


def with_momentum(momentum, scale=5.0):
    before, now = (positive - negative for positive, negative in CONDITIONS)
    return CONDITIONS[1][1] + scale * (now + momentum * before)


@pytest.mark.parametrize("momentum", [-0.75, -0.5, 0.5])
def test_guidance_with_a_momentum_has_a_memory(momentum):
    assert has_memory(with_momentum(momentum), CONDITIONS[1], CONDITIONS[0])


@pytest.mark.parametrize(
    "answer",
    [
        with_momentum(0.0),
        # As APG weighs each channel of a video apart, RescaleCFG each picture, CFGNorm each place.
        with_momentum(0.0) * torch.linspace(0.5, 1, 2)[:, None, None, None],
        with_momentum(0.0) * drawn(7).norm(dim=1, keepdim=True),
        with_momentum(0.0).clamp(-2, 2),
    ],
    ids=["plain", "scaled", "weighed by place", "clamped"],
)
def test_guidance_without_one_has_none(answer):
    assert not has_memory(answer, CONDITIONS[1], CONDITIONS[0])


@pytest.mark.parametrize("scale", [0.0, 1.0, 7.0])
def test_the_scale_of_guidance_is_found(scale):
    parts = [drawn(1).half(), drawn(3).half()]
    assert scale_of(torch.lerp(parts[1], parts[0], scale), parts) == pytest.approx(scale, abs=1e-2)


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (1.1 * with_momentum(0.0), CONDITIONS[1]),
        (with_momentum(0.0).clamp(-2, 2), CONDITIONS[1]),
        (drawn(1), [drawn(1)] * 2),
        (drawn(1), [drawn(1)]),
        (drawn(1), [drawn(1), drawn(2), drawn(3)]),
    ],
    ids=["larger", "clamped", "without a difference", "of one answer", "of three"],
)
def test_guidance_that_does_not_only_scale_has_no_scale(answer, parts):
    assert scale_of(answer, parts) is None


def test_a_scale_that_is_far_from_the_one_before_jumps():
    assert jumps(1.0, 7.0) and jumps(7.0, 1.0) and jumps(-2.0, 2.0)
    assert not (jumps(7.0, 7.0) or jumps(5.0, 6.0) or jumps(0.1, 0.4))


def test_channels_of_a_video_may_be_weighed_apart():
    parts = [drawn(seed, 1, 4, 3, 16, 16) for seed in (1, 2)]
    before = [part + 0.1 * drawn(3, 1, 4, 3, 16, 16) for part in parts]
    weights = torch.rand(1, 4, 1, 1, 1, generator=torch.Generator().manual_seed(1))
    assert not has_memory(parts[0] * weights + parts[1], parts, before)
    assert has_memory(parts[0] + before[1], parts, before)
