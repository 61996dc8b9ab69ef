from dataclasses import replace
from pathlib import Path

import pytest

from tests.configs import refused
from tests.sweep_folder import write
from tests.unit.analysis.sweeps import OK, attempted, make_sweep, rows_of, spec_of, values
from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.figures.plots.comm import figure, points
from ultrabench.analysis.results.ranking import rank
from ultrabench.device_rates import OPERATIONS, link_measurements
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout

PROBE = KernelConfig(name="probe", kind="probe", precision="bf16")


def measured(*sizes, scale):
    rates = {"busbw_bytes_per_s": 1.0, "busbw_p5_bytes_per_s": 0.5, "busbw_p95_bytes_per_s": 2.0}
    of_size = ({name: scale * share * size for name, share in rates.items()} for size in sizes)
    return [{"bytes": size, "seconds": 1e-3} | speeds for size, speeds in zip(sizes, of_size, strict=True)]


def probe(scale, inside, *sizes):
    rows = {"all": measured(*sizes, scale=scale), "intra_node": measured(*sizes, scale=inside)}
    return {"gemm_flops_per_s": [6e14, 7e14], "collectives": dict.fromkeys(OPERATIONS, rows)}


def probed(nodes, *measured, repeat=0):
    """The row of a run that measured links."""
    columns = {
        "model": None,
        "kernel": "probe",
        "cluster": "local",
        "bandwidths": link_measurements(probe(*measured)),
    }
    return row("p", nodes=nodes, repeat=repeat, **columns)


def test_a_probe_has_rates_and_is_no_run_of_a_model(tmp_path):
    """The row says what the links did, and no ranking or heatmap takes it for training."""
    spec, link_rates = spec_of(Layout(dp=16), kernel=PROBE, nodes=2), probe(10.0, 100.0, 2**20, 2**28)
    folder = make_sweep(tmp_path / "comm", [spec], kernel=PROBE)
    write(folder, *attempted(spec, replace(OK, step_times_s=(), probe=link_rates)))
    (probe_row,) = rows_of(folder)
    expected = {
        "status": "ok", "nodes": 2, "gpus": 16, "kernel": "probe", "gemm_flops_per_s": 6e14,
        "sendrecv_busbw_bytes_per_s": 10.0 * 2**28, "alltoall_intra_node_busbw_bytes_per_s": 100.0 * 2**28,
    }  # fmt: skip
    of_training = ("model", "num_params", "dp", "gbs", "mfu", "tokens_per_s", "predicted_step_time_s")
    expected |= dict.fromkeys(of_training)
    assert values(probe_row, expected) == expected
    assert len(probe_row["bandwidths"]) == 5 * 2 * 2
    assert rank(table_of(probe_row)) == []


def points_of(operation, *rows):
    frame, _ = points(table_of(*rows))
    return frame[frame["operation"] == operation].drop(columns="operation").values.tolist()


def test_points_join_repeats_and_take_a_node_alone_where_there_is_one():
    """Sizes that 24 ranks cut a little smaller are the same size."""
    cut = 2**20 // 96 * 96
    rows = probed(1, 90.0, 90.0, 2**20), probed(3, 8.0, 70.0, cut), probed(3, 12.0, 70.0, cut, repeat=1)
    assert points_of("allgather", *rows) == [
        [2**20, 1, 45.0 * 2**20, 90.0 * 2**20, 180.0 * 2**20],
        [2**20, 3, 4.0 * cut, pytest.approx(10.0 * cut), 24.0 * cut],
    ]


def test_runs_on_several_nodes_say_what_one_is_like_inside():
    link_points = points_of("sendrecv", probed(2, 8.0, 70.0, 2**20))
    assert [(nodes, middle / 2**20) for _, nodes, _, middle, _ in link_points] == [(1, 70.0), (2, 8.0)]


@pytest.mark.parametrize(
    ("rows", "number", "words"),
    [
        ([probed(n, 9.0 / n, 9.0, 2**20, 2**28) for n in (1, 2)], 5 * 2 * 2,
         ["AllToAll", "SendRecv", ">256 MiB<", ">1 MiB<", "within", ">2<"]),
        ([probed(1, 9.0, 9.0, 2**20)], 5, [">0.01<"]),
    ],
)  # fmt: skip
def test_the_figure_has_a_panel_for_each_operation_and_a_plain_scale(rows, number, words):
    drawn, notes = points(table_of(*rows))
    assert len(drawn) == number
    svg = render(lambda: figure(drawn, title="comm", notes=notes), Path("f.svg")).decode()
    assert [text for text in words if text not in svg] == []
    assert "mathdefault" not in svg


def test_an_operation_that_was_not_measured_has_an_empty_panel():
    probe_row = probed(1, 9.0, 9.0, 2**20)
    probe_row["bandwidths"] = [link for link in probe_row["bandwidths"] if link["operation"] != "alltoall"]
    drawn, notes = points(table_of(probe_row))
    assert len(drawn) == 4
    assert len(figure(drawn, title="comm", notes=notes).axes) == 5


def test_nothing_to_draw_and_two_places_are_mistakes():
    none = "the table has no bandwidths by size; measure them with: ultrabench sweep launch sweep=comm"
    with refused(none):
        points(table_of(row("a")))
    with refused("sweep=comm; draw the *_busbw_bytes_per_s of these jobs with: ultrabench report"):
        points(table_of(row("a", allreduce_busbw_bytes_per_s=4e11)))
    local = probed(1, 1.0, 1.0, 2**20)
    with refused("2 places (h100x8 of elsewhere; h100x8 of local)"):
        points(table_of(local, local | {"cluster": "elsewhere"}))
