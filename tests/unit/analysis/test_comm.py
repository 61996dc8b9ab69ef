from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.analysis.sweeps import LAYOUTS, OK, candidate, claim, make_sweep, rows_of, spec_of
from ultrabench.analysis.collect import collect
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.figures.plots.comm import figure, points
from ultrabench.analysis.ranking import rank
from ultrabench.device_rates import OPERATIONS
from ultrabench.errors import ConfigError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.store.journal import JournalWriter

PROBE = KernelConfig(name="probe", kind="probe", precision="bf16")


def measured(*sizes, scale=1.0):
    return [
        {"bytes": size, "seconds": 1e-3, "busbw_bytes_per_s": scale * size, "busbw_p5_bytes_per_s": scale * size / 2,
         "busbw_p95_bytes_per_s": scale * size * 2} for size in sizes
    ]  # fmt: skip


def probe(scale, inside, *sizes):
    rows = {"all": measured(*sizes, scale=scale), "intra_node": measured(*sizes, scale=inside)}
    return {"gemm_flops_per_s": [6e14, 7e14], "collectives": dict.fromkeys(OPERATIONS, rows)}


def sweep(path, *runs):
    """A sweep of (nodes, repeat, probe), 8 GPUs a node."""
    specs = {n: spec_of(Layout(dp=8 * n), kernel=PROBE, nodes=n) for n, _, _ in runs}
    folder = make_sweep(path, [candidate(spec) for spec in specs.values()], kernel=PROBE)
    writer = JournalWriter(folder.journal, "agent")
    for nodes, repeat, found in runs:
        claim(writer, specs[nodes], repeat, result=replace(OK, step_times_s=(), probe=found))
    return folder


def table_of(folder):
    return collect([folder], lambda message: pytest.fail(message))


def test_a_probe_has_rates_and_is_no_run_of_a_model(tmp_path):
    """The row says what the links did, and no ranking or heatmap takes it for training."""
    folder = sweep(tmp_path / "comm", (2, 0, probe(10.0, 100.0, 2**20, 2**28)))
    (row,) = rows_of(folder)
    assert (row["status"], row["nodes"], row["gpus"], row["kernel"]) == ("ok", 2, 16, "probe")
    assert row["gemm_flops_per_s"] == 6e14
    assert row["sendrecv_busbw_bytes_per_s"] == 10.0 * 2**28
    assert row["alltoall_intra_node_busbw_bytes_per_s"] == 100.0 * 2**28
    assert len(row["bandwidths"]) == 5 * 2 * 2
    for name in ("model", "num_params", "dp", "gbs", "mfu", "tokens_per_s", "predicted_step_time_s"):
        assert row[name] is None, name
    assert rank(table_of(folder)) == []


def points_of(folder, operation):
    found, _ = points(table_of(folder))
    return found[found["operation"] == operation].drop(columns="operation").values.tolist()


def test_points_join_repeats_and_take_a_node_alone_where_there_is_one(tmp_path):
    """Sizes that 24 ranks cut a little smaller are the same size."""
    cut = 2**20 // 96 * 96
    runs = [(1, 0, probe(90.0, 90.0, 2**20)), (3, 0, probe(8.0, 70.0, cut)), (3, 1, probe(12.0, 70.0, cut))]
    assert points_of(sweep(tmp_path / "comm", *runs), "allgather") == [
        [2**20, 1, 45.0 * 2**20, 90.0 * 2**20, 180.0 * 2**20],
        [2**20, 3, 4.0 * cut, pytest.approx(10.0 * cut), 24.0 * cut],
    ]


def test_runs_on_several_nodes_say_what_one_is_like_inside(tmp_path):
    found = points_of(sweep(tmp_path / "comm", (2, 0, probe(8.0, 70.0, 2**20))), "sendrecv")
    assert [(nodes, middle / 2**20) for _, nodes, _, middle, _ in found] == [(1, 70.0), (2, 8.0)]


@pytest.mark.parametrize("gone", [None, "alltoall"])
def test_the_figure_is_drawn_the_same_each_time(tmp_path, gone):
    runs = [(n, 0, probe(9.0 / n, 9.0, 2**20, 2**28)) for n in (1, 2)]
    for _, _, found in runs:
        found["collectives"].pop(gone, None)
    table = table_of(sweep(tmp_path / "comm", *runs))
    drawn, notes = points(table)
    assert len(drawn) == (4 if gone else 5) * 2 * 2
    svg = [render(lambda: figure(drawn, title="comm", notes=notes), Path("f.svg")) for _ in range(2)]
    assert svg[0] == svg[1]
    for word in (b"AllToAll", b"SendRecv", b"256 MiB", b"1 MiB", b"inside", b"2</text>"):
        assert word in svg[0]


def test_bandwidths_of_one_size_on_one_node_have_a_plain_scale(tmp_path):
    drawn, notes = points(table_of(sweep(tmp_path / "comm", (1, 0, probe(9.0, 9.0, 2**20)))))
    svg = render(lambda: figure(drawn, title="comm", notes=notes), Path("f.svg"))
    assert b"0.01</text>" in svg
    assert b"mathdefault" not in svg


def test_nothing_to_draw_and_two_places_are_mistakes(tmp_path):
    trained = make_sweep(tmp_path / "trained", [candidate(spec_of(LAYOUTS[0]))])
    none = table_of(trained)
    with pytest.raises(ConfigError, match=r"sweep=comm$"):
        points(none)
    at = none.schema.get_field_index("allreduce_busbw_bytes_per_s")
    with pytest.raises(ConfigError, match=r"sweep=comm; draw .* ultrabench report"):
        points(none.set_column(at, none.schema.field(at), [[4e11] * len(none)]))
    table = table_of(sweep(tmp_path / "comm", (1, 0, probe(1.0, 1.0, 2**20))))
    at = table.schema.get_field_index("cluster")
    elsewhere = table.set_column(at, table.schema.field(at), [["elsewhere"]])
    with pytest.raises(ConfigError, match=r"2 places .h100x8 of elsewhere; h100x8 of local."):
        points(pa.concat_tables([table, elsewhere]))
