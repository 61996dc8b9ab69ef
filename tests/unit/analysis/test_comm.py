from dataclasses import replace
from pathlib import Path

import pytest

from tests.configs import refused
from tests.unit.analysis.sweeps import OK, candidate, claim, make_sweep, rows_of, spec_of
from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.figures.plots.comm import figure, points
from ultrabench.analysis.ranking import rank
from ultrabench.device_rates import OPERATIONS
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.store.journal import JournalWriter

PROBE = KernelConfig(name="probe", kind="probe", precision="bf16")


def measured(*sizes, scale):
    rates = {"busbw_bytes_per_s": 1.0, "busbw_p5_bytes_per_s": 0.5, "busbw_p95_bytes_per_s": 2.0}
    of_size = ({name: scale * share * size for name, share in rates.items()} for size in sizes)
    return [{"bytes": size, "seconds": 1e-3} | held for size, held in zip(sizes, of_size, strict=True)]


def probe(scale, inside, *sizes):
    rows = {"all": measured(*sizes, scale=scale), "intra_node": measured(*sizes, scale=inside)}
    return {"gemm_flops_per_s": [6e14, 7e14], "collectives": dict.fromkeys(OPERATIONS, rows)}


@pytest.fixture
def probed(tmp_path):
    """Makes the rows of a sweep from (nodes, repeat, probe) of each run, with 8 GPUs a node."""

    def rows(*runs):
        specs = {n: spec_of(Layout(dp=8 * n), kernel=PROBE, nodes=n) for n, _, _ in runs}
        folder = make_sweep(tmp_path / "comm", [candidate(spec) for spec in specs.values()], kernel=PROBE)
        writer = JournalWriter(folder.journal, "agent")
        for nodes, repeat, found in runs:
            claim(writer, specs[nodes], repeat, result=replace(OK, step_times_s=(), probe=found))
        return rows_of(folder)

    return rows


def test_a_probe_has_rates_and_is_no_run_of_a_model(probed):
    """The row says what the links did, and no ranking or heatmap takes it for training."""
    (told,) = probed((2, 0, probe(10.0, 100.0, 2**20, 2**28)))
    expected = {
        "status": "ok", "nodes": 2, "gpus": 16, "kernel": "probe", "gemm_flops_per_s": 6e14,
        "sendrecv_busbw_bytes_per_s": 10.0 * 2**28, "alltoall_intra_node_busbw_bytes_per_s": 100.0 * 2**28,
    }  # fmt: skip
    expected |= dict.fromkeys(
        ("model", "num_params", "dp", "gbs", "mfu", "tokens_per_s", "predicted_step_time_s")
    )
    assert {name: told[name] for name in expected} == expected
    assert len(told["bandwidths"]) == 5 * 2 * 2
    assert rank(table_of(told)) == []


def points_of(rows, operation):
    found, _ = points(table_of(*rows))
    return found[found["operation"] == operation].drop(columns="operation").values.tolist()


def test_points_join_repeats_and_take_a_node_alone_where_there_is_one(probed):
    """Sizes that 24 ranks cut a little smaller are the same size."""
    cut = 2**20 // 96 * 96
    runs = [(1, 0, probe(90.0, 90.0, 2**20)), (3, 0, probe(8.0, 70.0, cut)), (3, 1, probe(12.0, 70.0, cut))]
    assert points_of(probed(*runs), "allgather") == [
        [2**20, 1, 45.0 * 2**20, 90.0 * 2**20, 180.0 * 2**20],
        [2**20, 3, 4.0 * cut, pytest.approx(10.0 * cut), 24.0 * cut],
    ]


def test_runs_on_several_nodes_say_what_one_is_like_inside(probed):
    found = points_of(probed((2, 0, probe(8.0, 70.0, 2**20))), "sendrecv")
    assert [(nodes, middle / 2**20) for _, nodes, _, middle, _ in found] == [(1, 70.0), (2, 8.0)]


@pytest.mark.parametrize(
    ("sizes", "nodes", "gone", "words"),
    [
        ((2**20, 2**28), (1, 2), None, ["AllToAll", "SendRecv", ">256 MiB<", ">1 MiB<", "inside", ">2<"]),
        ((2**20,), (1,), "alltoall", [">0.01<"]),
    ],
)
def test_the_figure_has_a_panel_for_each_operation_and_a_plain_scale(probed, sizes, nodes, gone, words):
    runs = [(n, 0, probe(9.0 / n, 9.0, *sizes)) for n in nodes]
    for _, _, found in runs:
        found["collectives"].pop(gone, None)
    drawn, notes = points(table_of(*probed(*runs)))
    assert len(drawn) == (4 if gone else 5) * len(sizes) * len(nodes)
    svg = render(lambda: figure(drawn, title="comm", notes=notes), Path("f.svg")).decode()
    assert [word for word in words if word not in svg] == []
    assert "mathdefault" not in svg


def test_nothing_to_draw_and_two_places_are_mistakes(probed):
    with refused("no bandwidths by size here; measure them with: ultrabench sweep launch sweep=comm"):
        points(table_of(row("a")))
    with refused("sweep=comm; draw the *_busbw_bytes_per_s of these jobs with: ultrabench report"):
        points(table_of(row("a", allreduce_busbw_bytes_per_s=4e11)))
    (here,) = probed((1, 0, probe(1.0, 1.0, 2**20)))
    with refused("2 places (h100x8 of elsewhere; h100x8 of local)"):
        points(table_of(here, here | {"cluster": "elsewhere"}))
