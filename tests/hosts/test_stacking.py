"""What is said of merging together with other nodes, from figures made by hand."""

import pytest

from benchmarks import stacking


def row(change, *seconds):
    return {"seconds": list(seconds), "change": change}


RUN = {
    "plain": row(0.0, 8.0, 16.0, 8.0),
    "merging": row(0.02, 4.0, 8.0, 4.0),
    "EasyCache": row(0.01, 5.0, 8.0, 4.0),
    "merging and EasyCache": row(0.03, 2.0, 4.0, 2.5),
    "Sage, stand-in": row(0.0, 8.0, 16.0, 8.0),
    "merging and Sage, stand-in": row(0.02, 8.0, 16.0, 8.0),
}


def test_times_are_compared_within_a_round():
    assert stacking.times_faster(RUN, "EasyCache") == 2
    assert stacking.times_faster(RUN, "merging and EasyCache") == 4


def test_a_node_adds_up_with_merging_or_does_not():
    line = stacking.summary("UNet", RUN)
    assert line == "summary: UNet EasyCache=1.00 Sage=0.50"
    first, second = (
        [cell.strip() for cell in each.split("|")[1:-1]]
        for each in stacking.table(RUN).splitlines()[2:]
    )
    assert first == ["EasyCache", "2.00", "2.00", "4.00", "4.00", "0.0100", "0.0200", "0.0300"]
    assert second[:5] == ["Sage, stand-in", "1.00", "2.00", "1.00", "2.00"]


def test_the_page_has_the_tables_of_all_models():
    machine = {"description": "2 threads"}
    page = stacking.markdown(
        {"command": "it", "machine": machine, "date": "today", "preset": "fast", "ratio": 0.5}
        | {"steps": 20, "rounds": 3, "runs": {"UNet": RUN, "transformer": RUN}}
    )
    assert page.count(stacking.table(RUN)) == 2
    assert "## transformer" in page and "`it`, 2 threads, today." in page


@pytest.mark.parametrize("model", stacking.MODELS)
def test_every_other_node_is_there(model):
    names = {"EasyCache", "LazyCache", "TorchCompileModel", "Sage, stand-in"}
    names |= {"HyperTile", "PatchModelAddDownscale"} if model == "UNet" else set()
    assert names <= stacking.MODELS[model][1].keys()
