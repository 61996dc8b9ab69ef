import pytest

from ultrabench.analysis.results.schema import GROUPS
from ultrabench.device_rates import DEVICE_RATES, OPERATIONS, crossing_share, link_measurements, summary


def rows(*rates):
    return [{"bytes": 2**n, "seconds": 1e-3, "busbw_bytes_per_s": rate} for n, rate in enumerate(rates)]


WHOLE = {
    "event": "probe", "gemm_flops_per_s": [7e14, 6e14, 6.5e14], "memory_copy_bytes_per_s": [3e12, 2.5e12, 2.9e12],
    "collectives": {
        "allreduce": {"all": rows(1e9, 4e10)[::-1], "intra_node": rows(2e9, 3e11)},
        "allgather": {"all": rows(1e9, 5e10), "intra_node": rows(2e9, 2e11)},
        "reducescatter": {"all": rows(1e9, 6e10), "intra_node": None},
    },
}  # fmt: skip
KNOWN = {
    "gemm_flops_per_s": 6e14, "memory_copy_bytes_per_s": 2.5e12, "allreduce_busbw_bytes_per_s": 4e10,
    "allgather_busbw_bytes_per_s": 5e10, "reducescatter_busbw_bytes_per_s": 6e10,
    "allreduce_intra_node_busbw_bytes_per_s": 3e11, "allgather_intra_node_busbw_bytes_per_s": 2e11,
}  # fmt: skip
NOTHING = dict.fromkeys(summary({}))
LONG = {"bytes": 2.0, "seconds": 1.0, "busbw_bytes_per_s": 2.0, "busbw_p5_bytes_per_s": 1.0,
        "busbw_p95_bytes_per_s": 3.0}  # fmt: skip


def test_the_columns_are_those_of_the_results():
    names = {column.name for column in GROUPS["State of the cluster"]}
    assert NOTHING.keys() == {n for n in names if n in DEVICE_RATES or "busbw" in n}
    assert len(NOTHING) == len(DEVICE_RATES) + 2 * len(OPERATIONS)


def test_the_slowest_device_and_the_largest_size():
    assert summary(WHOLE) == NOTHING | KNOWN


@pytest.mark.parametrize("rates", [[], [7e14, None], [7e14, "6e14"], [7e14, float("nan")], [True], 7e14])
def test_the_slowest_device_is_known_if_all_are(rates):
    assert summary({**WHOLE, "gemm_flops_per_s": rates}) == summary(WHOLE) | {"gemm_flops_per_s": None}


@pytest.mark.parametrize(
    "bad",
    [[{"bytes": 2**20}], [{"busbw_bytes_per_s": 1e9}], [None], ["x"], 3, "x", None, [{"bytes": None}], [],
     rows(1e9, None), rows(1e9, float("inf")), rows(1e9, "4e10")],
)  # fmt: skip
def test_links_that_are_damaged_are_not_known_and_the_rest_is(bad):
    allreduce = {"all": bad, "intra_node": rows(1.0)}
    rates = summary({**WHOLE, "collectives": {**WHOLE["collectives"], "allreduce": allreduce}})
    expected = {"allreduce_busbw_bytes_per_s": None, "allreduce_intra_node_busbw_bytes_per_s": 1.0}
    assert rates == summary(WHOLE) | expected


def test_shares_are_those_of_nccl_tests():
    assert [crossing_share(name, 8) for name in OPERATIONS] == [1.75, 0.875, 0.875, 0.875, 1.0]
    assert [crossing_share(name, 1) for name in OPERATIONS] == [0, 0, 0, 0, 1.0]


def test_bandwidths_are_one_list_without_what_is_damaged():
    odd = LONG | {"seconds": float("inf")}
    whole = {"sendrecv": {"all": [LONG, odd], "intra_node": None}, "alltoall": {"all": [LONG, 1]}}
    measurements = link_measurements({"collectives": whole})
    assert measurements == [
        {"operation": "sendrecv", "scope": "all", **row, "seconds": s}
        for row, s in ((LONG, 1.0), (odd, None))
    ]
    assert type(measurements[0]["bytes"]) is int
