"""Numbers as texts with units."""

import pytest

from ultrabench.analysis.results.numbers import with_unit


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("busbw_bytes_per_s", 9.994e8, "999 MB/s"),
        ("busbw_bytes_per_s", 9.996e8, "1 GB/s"),
        ("busbw_bytes_per_s", 999.7, "1 kB/s"),
        ("gemm_flops_per_s", 1.52e15, "1.52 PFLOP/s"),
        ("peak_mem_reserved_bytes", 2**30 - 1, "1.00 GiB"),
        ("peak_mem_reserved_bytes", 1023 * 2**20, "1023 MiB"),
        ("peak_mem_reserved_bytes", 9.996 * 2**30, "10.0 GiB"),
    ],
)
def test_a_number_that_rounds_to_the_next_unit_has_that_unit(column, value, text):
    assert with_unit(column, value) == text
