from ultrabench.analysis.schema import GROUPS
from ultrabench.preflight import COLLECTIVES, summary


def rows(*bandwidths):
    return [
        {"bytes": 2**20 * 2**i, "seconds": 1e-3, "busbw_bytes_per_s": b} for i, b in enumerate(bandwidths)
    ]


WHOLE = {
    "gemm_flops_per_s": [7e14, 6e14, 6.5e14],
    "collectives": {
        "allreduce": {"all": rows(1e9, 4e10), "intra_node": rows(2e9, 3e11)},
        "allgather": {"all": rows(1e9, 5e10), "intra_node": rows(2e9, 2e11)},
        "reducescatter": {"all": rows(1e9, 6e10), "intra_node": rows(2e9, 1e11)},
    },
}
NOTHING = dict.fromkeys(summary({}))


def with_allreduce(value):
    return {**WHOLE, "collectives": {**WHOLE["collectives"], "allreduce": value}}


def test_the_columns_are_those_of_the_results():
    names = {column.name for column in GROUPS["State of the cluster"]}
    assert set(summary(WHOLE)) == {n for n in names if n == "gemm_flops_per_s" or "busbw" in n}
    assert len(summary(WHOLE)) == 1 + 2 * len(COLLECTIVES)


def test_the_slowest_device_and_the_largest_size():
    assert summary(WHOLE) == {
        "gemm_flops_per_s": 6e14,
        "allreduce_busbw_bytes_per_s": 4e10,
        "allgather_busbw_bytes_per_s": 5e10,
        "reducescatter_busbw_bytes_per_s": 6e10,
        "allreduce_intra_node_busbw_bytes_per_s": 3e11,
        "allgather_intra_node_busbw_bytes_per_s": 2e11,
        "reducescatter_intra_node_busbw_bytes_per_s": 1e11,
    }


def test_the_order_of_sizes_does_not_matter():
    assert summary(with_allreduce({"all": rows(1e9, 4e10)[::-1]}))["allreduce_busbw_bytes_per_s"] == 4e10


def test_the_line_of_a_report_serves_as_well():
    assert summary({"event": "probe", "time": 1.7e9, **WHOLE}) == summary(WHOLE)


def test_one_rank_has_no_links():
    alone = {name: {"all": [], "intra_node": None} for name in COLLECTIVES}
    assert summary({"gemm_flops_per_s": [5e10], "collectives": alone}) == NOTHING | {"gemm_flops_per_s": 5e10}


def test_what_is_damaged_is_not_known_and_the_rest_is():
    for rates in ([], [7e14, None], [7e14, "6e14"], [7e14, float("nan")], [True], 7e14, None):
        assert summary({**WHOLE, "gemm_flops_per_s": rates}) == summary(WHOLE) | {"gemm_flops_per_s": None}
    torn = [{"bytes": 2**20}], [{"busbw_bytes_per_s": 1e9}], [None], ["x"], 3, "x", None, [{"bytes": None}]
    for bad in (*torn, rows(1e9, None), rows(1e9, float("inf")), rows(1e9, "4e10")):
        found = summary(with_allreduce({"all": bad, "intra_node": rows(1.0)}))
        expected = {"allreduce_busbw_bytes_per_s": None, "allreduce_intra_node_busbw_bytes_per_s": 1.0}
        assert found == summary(WHOLE) | expected


def test_nothing_readable_gives_no_numbers():
    for bad in ({}, {"collectives": None}, {"collectives": []}, with_allreduce(None) | {"collectives": {}}):
        found = summary(bad)
        assert {k: v for k, v in found.items() if k != "gemm_flops_per_s"} == {
            k: v for k, v in NOTHING.items() if k != "gemm_flops_per_s"
        }
