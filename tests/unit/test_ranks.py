"""Which ranks call a model in step, and how they agree."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tome_nodes import ranks
from tome_nodes.ranks import Ranks, ranks_of, voted

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="PyTorch has no torch.distributed"
)


@pytest.fixture
def store():
    return torch.distributed.HashStore()


def votes_of(store, votes, is_new=False):
    """What comes of the votes of several ranks, by rank, at once."""
    with ThreadPoolExecutor(len(votes)) as threads:
        found = {
            own: threads.submit(voted, store, own, (3, 5, 8), may, is_new)
            for own, may in votes.items()
        }
    return {own: each.result() for own, each in found.items()}


def test_all_do_what_all_may(store):
    for votes in (True, True, True), (True, False, True), (False,) * 3, (True, True, True):
        found = votes_of(store, dict(zip((3, 5, 8), votes, strict=True)))
        assert found == dict.fromkeys((3, 5, 8), all(votes))


def test_turns_leave_nothing_in_the_store(store):
    kept = set()
    for _ in range(5):
        votes_of(store, dict.fromkeys((3, 5, 8), True))
        kept.add(store.num_keys())
    assert len(kept) == 1


def test_a_rank_that_votes_against_it_waits_for_nobody(store):
    for _ in range(2):
        assert votes_of(store, {5: False}) == {5: False}
    for _ in range(2):
        assert votes_of(store, {3: True, 8: True}) == {3: False, 8: False}
    assert votes_of(store, dict.fromkeys((3, 5, 8), True)) == dict.fromkeys((3, 5, 8), True)


def test_nobody_waits_for_ever_for_a_rank_nor_does_one_that_is_late_disagree(store, monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    assert votes_of(store, {3: True, 8: True}) == {3: None, 8: None}
    assert votes_of(store, {5: True}) == {5: None}
    assert votes_of(store, {3: True, 5: True, 8: True}) == dict.fromkeys((3, 5, 8), True)


def test_a_rank_that_has_missed_votes_on_another_model_votes_on_the_next(store, monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    assert votes_of(store, {3: True, 8: True}) == {3: None, 8: None}
    assert votes_of(store, {3: True}) == {3: None}
    monkeypatch.setattr(ranks, "PATIENCE", 20.0)
    assert votes_of(store, {3: True, 5: False, 8: True}, True) == dict.fromkeys((3, 5, 8), False)
    assert votes_of(store, {3: True, 5: True, 8: True}) == dict.fromkeys((3, 5, 8), True)


@pytest.fixture
def group():
    """Rank 5 of 8, without the others."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", rank=5, world_size=8, store=fake.FakeStore())
    yield
    torch.distributed.destroy_process_group()


def sharded(shape, *placements):
    """A model, one of whose weights lies on a mesh of such a shape."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(tensor, "Shard"):
        pytest.skip("this PyTorch has no torch.distributed.tensor.Shard")
    mesh = torch.distributed.init_device_mesh("cpu", shape)
    kinds = {"R": tensor.Replicate(), "S": tensor.Shard(0)}
    model = nn.Linear(8, 8)
    weight = tensor.distribute_tensor(model.weight, mesh, [kinds[each] for each in placements])
    model.weight = nn.Parameter(weight)
    return model


@pytest.mark.parametrize(
    ("shape", "placements", "expected"),
    [
        ((8,), "S", [0, 1, 2, 3, 4, 5, 6, 7]),
        # Replicas may draw other pictures.
        ((8,), "R", []),
        ((2, 4), "RS", [4, 5, 6, 7]),
        ((2, 4), "SR", [1, 5]),
        ((8, 1), "RS", []),
        ((2, 2, 2), "SRS", [0, 1, 4, 5]),
    ],
)
@pytest.mark.usefixtures("group")
def test_those_that_share_weights_call_a_model_in_step(shape, placements, expected):
    assert list(ranks_of(sharded(shape, *placements))) == expected


@pytest.mark.usefixtures("group")
def test_a_model_in_one_piece_has_no_other_ranks():
    assert not ranks_of(nn.Linear(8, 8))


def test_ranks_without_a_store_go_on_without_each_other_and_say_so_once(log_messages, monkeypatch):
    monkeypatch.setattr(ranks, "ranks_of", lambda model: (0, 1))
    both = Ranks(nn.Linear(8, 8))
    with torch.no_grad():
        assert [both.agree(True), both.agree(True)] == [False, False]
    (line,) = log_messages()
    assert "the ranks cannot agree: ValueError: Default process group has not been init" in line


def test_without_a_process_group_there_are_no_ranks():
    assert not ranks_of(nn.Linear(8, 8))
