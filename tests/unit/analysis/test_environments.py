import json

import pytest

from tests.configs import refused
from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.page.rows import document
from ultrabench.analysis.results.ranking import leaderboard, rank
from ultrabench.analysis.studies.compare.compare import compare


def measured_in(env_id, rate, sweep=None, *, env=None, run_id="a", repeat=0, **parts):
    parts = {"torch_version": "2.13", "kernel_digest": "d", "env": env and json.dumps(env)} | parts
    return row(run_id, rate, sweep=sweep or env_id, env_id=env_id, repeat=repeat, **parts)


RING, TREE = ({"env": {"ALGO": algo, "DEBUG": "1"}} for algo in ("Ring", "Tree"))
IN_RING = table_of(measured_in("e1", 20.0, **RING))
IN_BOTH = table_of(measured_in("e1", 20.0, **RING), measured_in("e2", 10.0, **TREE))


def test_runs_of_one_layout_in_two_environments_compete():
    (cell,) = rank(IN_BOTH)
    assert (cell.tokens_per_s_per_gpu, cell.env_id, cell.environment) == (20.0, "e1", "ALGO=Ring")
    assert (cell.num_runs, cell.num_repeats) == (2, 1)
    (board,) = leaderboard(IN_BOTH)
    rates = {r["environment"]: r["tokens_per_s_per_gpu"] for r in board}
    assert [*rates.items()] == [("ALGO=Ring", 20.0), ("ALGO=Tree", 10.0)]


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        (RING, {}, ["ALGO=Ring DEBUG=1", "ALGO unset DEBUG unset"]),
        ({"torch_version": "2.11"}, {}, ["torch 2.11", "torch 2.13"]),
        ({"kernel_digest": "c"}, {}, ["program c", "program d"]),
        ({"variables": '{"NCCL_ALGO": "Ring"}'}, {}, ["NCCL_ALGO=Ring", "NCCL_ALGO unset"]),
        ({}, {}, ["environment e1", "environment e2"]),
        ({"driver_version": "550"}, {"driver_version": "535"}, ["driver 550", "driver 535"]),
    ],
)  # fmt: skip
def test_a_label_names_what_differs(first, second, labels):
    (board,) = leaderboard(table_of(measured_in("e1", 20.0, **first), measured_in("e2", 10.0, **second)))
    assert [r["environment"] for r in board] == labels


def test_equal_environments_of_two_sweeps_are_repeats():
    (cell,) = rank(table_of(measured_in("e1", 20.0, "s1"), measured_in("e1", 10.0, "s2")))
    assert (cell.environment, cell.num_runs, cell.num_repeats) == (None, 1, 2)


@pytest.mark.parametrize(("others", "runs"), [({}, 1), ({"torch_version": "2.11"}, 2), ({"sweep": "s2"}, 2)])
def test_environments_of_one_sweep_that_differ_in_the_driver_alone_are_one(others, runs):
    second = measured_in("e2", 10.0, "s1", repeat=1, driver_version="535") | others
    (cell,) = rank(table_of(measured_in("e1", 20.0, "s1", driver_version="550"), second))
    assert cell.num_runs == runs


def test_a_run_that_failed_early_belongs_to_the_environment_of_its_sweep():
    failed = {"status": "crash", "tokens_per_s_per_gpu": None, "env_id": "nothing seen"}
    table = table_of(
        measured_in("e1", 20.0, "s1"), measured_in("e1", 20.0, "s1", repeat=1) | failed, measured_in("e2", 10.0, "s2"),
        measured_in("e2", 10.0, "s2", run_id="b") | failed,
    )  # fmt: skip
    (board,) = leaderboard(table)
    ends = {(r["run_id"], r["environment"]): (r["num_repeats"], r["num_repeats_failed"]) for r in board}
    first, second = "environment e1", "environment e2"
    assert ends == {("a", first): (2, 1), ("a", second): (1, 0), ("b", second): (1, 1)}


def test_environments_are_not_ranked_by_the_ratio_to_controls_of_their_own():
    beside = {"control": "a", "control_ratio": 1.0}
    rows = measured_in("e1", 20.0, **RING, **beside), measured_in("e2", 10.0, **TREE, **beside)
    (cell,) = rank(table_of(*rows))
    assert (cell.ranked_by, cell.environment) == ("tokens_per_s_per_gpu", "ALGO=Ring")
    assert cell.as_good_as_best == ()


def test_layouts_are_compared_in_equal_environments():
    steps = {"step_times_s": [1.0] * 8}
    with refused(match=r"env is .*Ring.* / .*Tree.* in A and .* in B"):
        compare(IN_BOTH, table_of(measured_in("e3", 10.0, **steps)), 0.05)
    slower = table_of(measured_in("e1", 20.0, **RING), measured_in("e2", 5.0, **TREE))
    assert sorted(compare(IN_BOTH, slower, 0.05).rows["ratio"]) == pytest.approx([1.0, 2.0])
    differing = compare(IN_RING, table_of(measured_in("e2", 10.0, **TREE)), 0.05).differing
    assert differing["env"] == ('{"ALGO": "Ring", "DEBUG": "1"}', '{"ALGO": "Tree", "DEBUG": "1"}')


@pytest.mark.parametrize("public", [False, True])
def test_the_page_lists_both_environments_and_names_no_variable_where_it_is_public(public):
    columns = document(IN_BOTH, public=public)["columns"]
    assert len(columns["contender"]["distinct"]) == 2
    assert ("Ring" in json.dumps(columns)) is not public
    labels = ["environment e1", "environment e2"] if public else ["ALGO=Ring", "ALGO=Tree"]
    assert columns["environment"]["distinct"] == labels
