"""The table of workloads is what the rest can do."""

import inspect

import pytest

from benchmarks import clients, server, workloads
from benchmarks.peers import PEERS
from benchmarks.workloads import WORKLOADS

MEASURED = [row for row in WORKLOADS.values() if row.measure]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row.name)
def test_each_row_names_a_function_of_clients(row: workloads.Workload) -> None:
    assert inspect.iscoroutinefunction(getattr(clients, row.measure))


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row.name)
def test_each_load_is_a_script_and_quick_is_no_more(row: workloads.Workload) -> None:
    for load in (row.load, row.quick):
        for model in (load.model, load.beside):
            if model is not None and model != "m":  # unary: whatever the model
                server.Script.parse(model)
    assert row.quick.calls <= row.load.calls
    assert row.quick.at_once <= row.load.at_once


def test_rows_name_clients_and_workloads_that_there_are() -> None:
    for row in WORKLOADS.values():
        assert (row.clients or set()) <= PEERS.keys()
        assert set(row.needs) <= WORKLOADS.keys()
        assert row.budget is None or row.budget.to is None or row.budget.to in PEERS


def test_loads_that_are_compared_over_the_years_stay_as_they_are() -> None:
    loads = {name: WORKLOADS[name].load for name in ("burst", "paced", "crowd", "unary")}
    assert loads["burst"] == ("m-200-0-1", 1, 40, None)
    assert loads["paced"] == ("m-100-20000-1", 32, 32, None)
    assert loads["crowd"] == ("m-100-20000-1", 256, 256, None)
    assert loads["unary"] == ("m", 64, 640, None)


def test_flood_is_of_64_mib() -> None:
    beside = WORKLOADS["backpressure"].load.beside
    assert beside is not None
    assert clients.tokens_of(beside) * len(server.WORDS[0]) >= 64 * 2**20


def test_group_stands_for_its_sizes_and_the_order_is_the_tables() -> None:
    names = [row.name for row in workloads.chosen(["thousand", "burst", "thousand/500"])]
    assert names == ["burst", "thousand/250", "thousand/500", "thousand/1000"]
    assert [row.name for row in workloads.chosen(["thousand/500"])] == ["thousand/500"]


def test_usual_workloads_are_chosen_without_names() -> None:
    names = [row.name for row in workloads.chosen([])]
    assert names == ["burst", "paced", "crowd", "latency", "unary", "reuse", "memory"]


def test_memory_brings_what_it_is_worked_out_of() -> None:
    rows = workloads.with_needs(workloads.chosen(["memory"]))
    assert [row.name for row in rows] == ["burst", "crowd", "memory"]


@pytest.mark.parametrize("name", ["burts", "thousand/3"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        workloads.chosen(["burst", name])
