from ultrabench.analysis.schema import GROUPS
from ultrabench.device_rates import OPERATIONS, bandwidths, crossing_share, summary


def rows(*bandwidths):
    return [
        {"bytes": 2**20 * 2**i, "seconds": 1e-3, "busbw_bytes_per_s": b} for i, b in enumerate(bandwidths)
    ]


WHOLE = {
    "gemm_flops_per_s": [7e14, 6e14, 6.5e14],
    "memory_copy_bytes_per_s": [3e12, 2.5e12, 2.9e12],
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
    rates = {"gemm_flops_per_s", "memory_copy_bytes_per_s"}
    assert set(summary(WHOLE)) == {n for n in names if n in rates or "busbw" in n}
    assert len(summary(WHOLE)) == 2 + 2 * len(OPERATIONS)


def test_the_slowest_device_and_the_largest_size():
    assert summary(WHOLE) == NOTHING | {
        "gemm_flops_per_s": 6e14, "memory_copy_bytes_per_s": 2.5e12, "allreduce_busbw_bytes_per_s": 4e10,
        "allgather_busbw_bytes_per_s": 5e10, "reducescatter_busbw_bytes_per_s": 6e10,
        "allreduce_intra_node_busbw_bytes_per_s": 3e11, "allgather_intra_node_busbw_bytes_per_s": 2e11,
        "reducescatter_intra_node_busbw_bytes_per_s": 1e11,
    }  # fmt: skip


def test_the_order_of_sizes_and_other_fields_of_a_report_do_not_matter():
    assert summary(with_allreduce({"all": rows(1e9, 4e10)[::-1]}))["allreduce_busbw_bytes_per_s"] == 4e10
    assert summary({"event": "probe", "time": 1.7e9, **WHOLE}) == summary(WHOLE)


def test_one_rank_has_no_links():
    alone = {name: {"all": [], "intra_node": None} for name in OPERATIONS}
    assert summary({"gemm_flops_per_s": [5e10], "collectives": alone}) == NOTHING | {"gemm_flops_per_s": 5e10}


def test_what_is_damaged_is_not_known_and_the_rest_is():
    for rates in ([], [7e14, None], [7e14, "6e14"], [7e14, float("nan")], [True], 7e14, None):
        assert summary({**WHOLE, "gemm_flops_per_s": rates}) == summary(WHOLE) | {"gemm_flops_per_s": None}
    torn = [{"bytes": 2**20}], [{"busbw_bytes_per_s": 1e9}], [None], ["x"], 3, "x", None, [{"bytes": None}]
    for bad in (*torn, rows(1e9, None), rows(1e9, float("inf")), rows(1e9, "4e10")):
        found = summary(with_allreduce({"all": bad, "intra_node": rows(1.0)}))
        expected = {"allreduce_busbw_bytes_per_s": None, "allreduce_intra_node_busbw_bytes_per_s": 1.0}
        assert found == summary(WHOLE) | expected


def test_shares_are_those_of_nccl_tests():
    assert [crossing_share(name, 8) for name in OPERATIONS] == [1.75, 0.875, 0.875, 0.875, 1.0]
    assert [crossing_share(name, 1) for name in OPERATIONS] == [0, 0, 0, 0, 1.0]


def test_bandwidths_are_one_list_without_what_is_damaged():
    long = {"bytes": 2.0, "seconds": 1.0, "busbw_bytes_per_s": 2.0, "busbw_p5_bytes_per_s": 1.0,
            "busbw_p95_bytes_per_s": 3.0}  # fmt: skip
    whole = {"collectives": {"sendrecv": {"all": [long], "intra_node": None}, "alltoall": {"all": [long, 1]}}}
    assert bandwidths(whole) == [{"operation": "sendrecv", "scope": "all", **long}]
    assert type(bandwidths(whole)[0]["bytes"]) is int
    for bad in ({}, {"collectives": 3}, {"collectives": {"sendrecv": {"all": [long | {"bytes": "x"}]}}}):
        assert bandwidths(bad) == []
    (odd,) = bandwidths({"collectives": {"sendrecv": {"all": [long | {"seconds": float("inf")}]}}})
    assert odd["seconds"] is None


def test_nothing_readable_gives_no_numbers():
    for bad in ({}, {"collectives": None}, {"collectives": []}, with_allreduce(None) | {"collectives": {}}):
        assert not any(rate for name, rate in summary(bad).items() if "busbw" in name)
