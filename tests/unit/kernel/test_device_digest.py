"""What equal GPUs compute bit by bit, tried on a CPU, and which of them are blamed for differences."""

import os
import random
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from tests.unit.kernel.fake_gpu import CAPACITY_BYTES, INDEX, NAME, PROPERTIES, FakeGpu
from ultrabench.device_digest import (
    Against,
    DatedDigest,
    DeviceDigest,
    HostVerdict,
    dated_digests,
    differences,
    digest_of,
    host_verdicts,
)
from ultrabench.kernel.rank import digest_chain, environment

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
RIGHT = DeviceDigest(setup="H100, driver 570", parts={"bf16 products": "5e1f", "memory": "77a0"})
WRONG = replace(RIGHT, parts={**RIGHT.parts, "bf16 products": "5e1e"})


@contextmanager
def computing(parts):
    """Digests are those of these parts."""
    with patch.object(digest_chain, "parts_of", lambda _: parts):
        yield


def test_a_device_repeats_its_results():
    values = digest_chain.device_digest(CPU)
    digest = digest_of(values)
    assert values == digest_chain.device_digest(CPU)
    assert digest.second == {}
    assert len({*digest.parts.values()}) == len(digest.parts) == 7, "each part has results of its own"
    assert f"torch {torch.__version__}, chain 1" in digest.setup


def test_each_part_computes_what_its_name_says():
    """Products are x W W ... W in the precision that they name, within its rounding; the others come from integers."""
    size, results = digest_chain.SIZES["cpu"], {}
    for name, compute in digest_chain.parts_of(CPU).items():
        results[name] = compute(0)
        assert results[name].double().isfinite().all()
    for name, seed, num_rows, dtype in (
        ("bf16 products", 1, size.narrow_rows, torch.bfloat16), ("fp32 products", 1, size.wide_rows, torch.float32),
        ("fp64 products", 1, size.wide_rows // 4, torch.float64), ("fp8 products", 3, size.narrow_rows, FP8),
    ):  # fmt: skip
        x, weight = (digest_chain.seeded_matrix(num_rows, n, CPU).double() for n in (seed, seed + 1))
        if name == "fp8 products":  # its second factor is transposed
            weight = weight.t()
        for _ in range(size.num_products):
            x = x @ weight * (2 / num_rows**0.5)
        assert results[name].dtype == dtype
        error = (results[name].double() - x).norm() / x.norm()
        assert error < size.num_products * torch.finfo(dtype).eps
    x = digest_chain.seeded_matrix(size.wide_rows, 5, CPU).double() * 8
    sums = [
        result.sum(dim)
        for result in (x.softmax(-1), torch.rsqrt(x.square() + 1e-5), x.sigmoid() * x, x.logsumexp(0)[None])
        for dim in (0, 1)
    ]
    torch.testing.assert_close(results["reductions"].double(), torch.cat(sums), rtol=1e-5, atol=1e-4)
    num_words = size.block_bytes // 8
    assert torch.equal(results["copies"], torch.arange(num_words) * digest_chain.MULTIPLIER)


def test_the_chain_of_a_gpu_fills_its_free_memory_and_crosses_to_the_host():
    """It computes what CPUs do; memory that torch only holds is free; other setups are other texts."""
    gpu, blocks, size, pattern = FakeGpu(), [], digest_chain.SIZES["cpu"], digest_chain._pattern

    def recorded_pattern(device, *block):
        assert len(blocks) < 100, "more than the free memory"
        blocks.append(block)
        return pattern(device, *block)

    fakes = {"SIZES": {"cuda": size, "cpu": size}, "_pattern": recorded_pattern}
    with (
        patch.multiple(digest_chain, **fakes), patch.object(torch.cuda.nccl, "version", return_value=(2, 27)),
        patch.object(environment, "DRIVER_VERSION_SOURCE", ("/proc/version", "^(Linux) version")),
        patch.dict(os.environ, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}), gpu.installed(),
    ):  # fmt: skip
        device = environment.use_device("cuda", INDEX)
        gpu.allocate(CAPACITY_BYTES - 10 * size.block_bytes)
        digest = digest_of(digest_chain.device_digest(device))
        with patch.object(torch.cuda, "get_device_capability", return_value=(8, 9)):
            assert "fp8 products" not in digest_chain.parts_of(device)
    # All blocks of a pass are written before the first is compared.
    assert blocks == [(number, mask) for mask in (0, 0, -1, -1) for number in range(7)]
    copies = ["pinned", f"to {gpu.device}", "to cpu"]
    calls = [call for call in gpu.calls if call in (*copies, "empty_cache")]
    assert calls == ["empty_cache", *copies] * 2 + ["empty_cache"]
    assert (digest.device, digest.second) == (f"GPU-{PROPERTIES.uuid}", {})
    versions = f"torch {torch.__version__}, chain 1, CUBLAS_WORKSPACE_CONFIG=:4096:8"
    assert digest.setup == f"{NAME}, 40 multiprocessors, driver Linux, {versions}"
    assert digest.parts == digest_of(digest_chain.device_digest(CPU)).parts


def test_what_is_computed_differently_the_second_time_is_kept():
    results = iter([torch.ones(3), torch.zeros(2), torch.ones(3), torch.zeros(3)])
    with computing({"equal": lambda _: next(results), "other": lambda _: next(results)}):
        digest = digest_of(digest_chain.device_digest(CPU))
    assert [*digest.second] == ["other"]
    assert digest.second["other"] != digest.parts["other"]


def test_every_bit_of_a_result_counts():
    results = digest_chain.seeded_matrix(64, 1, CPU)
    flipped, swapped = results.clone(), results.flip(1)
    flipped.view(torch.int32)[-1, -1] ^= 1
    assert len({digest_chain.tensor_digest(tensor) for tensor in (results, flipped, swapped)}) == 3


def test_a_bit_of_memory_that_cannot_change_is_seen_by_one_of_two_passes():
    written_blocks = digest_chain._written_blocks

    def blocks_with_stuck_bit(*args):
        blocks = written_blocks(*args)
        blocks[0][5] |= 1 << 40
        return blocks

    assert not digest_chain._wrong_words(CPU, 0).numel()
    with patch.object(digest_chain, "_written_blocks", blocks_with_stuck_bit):
        wrong = [digest_chain._wrong_words(CPU, pass_number).tolist() for pass_number in range(2)]
    assert sorted(wrong) == [[], [[0, 1]]]


def test_the_order_of_sums_is_fixed():
    settings, num_threads = [], torch.get_num_threads()

    def see_settings(_):
        matmul = torch.backends.cuda.matmul
        reduces_narrow = matmul.allow_bf16_reduced_precision_reduction
        settings.append((torch.get_num_threads(), torch.get_float32_matmul_precision(), reduces_narrow))
        return torch.zeros(1)

    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    try:
        with computing({"settings": see_settings}):
            digest_chain.device_digest(CPU)
        after = torch.get_num_threads(), torch.get_float32_matmul_precision()
    finally:
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision("highest")
    assert settings == [(1, "highest", False)] * 2
    assert after == (2, "high")


def dated(*digests, source="first", time_s=1.7e9, host="n"):
    """Digests of one device on each of some hosts, computed at once."""
    return [DatedDigest(time_s, source, f"{host}{n}", 0, digest) for n, digest in enumerate(digests)]


def blamed(differing):
    return [(d.dated.source, d.dated.host, d.against, d.parts) for d in differing]


def test_a_minority_of_three_or_more_is_blamed():
    of_others = ("first", "n1", Against.OTHERS, ("bf16 products",))
    differing = differences(dated(RIGHT, WRONG, RIGHT))
    assert blamed(differing) == [of_others]
    text = "device 0 computed bf16 products differently from 2 of 3 equal devices"
    assert differing[0].text == text
    assert host_verdicts(differing) == {"n1": HostVerdict(False, f"{text} in 1 preflight")}
    both_wrong = replace(WRONG, parts={**WRONG.parts, "memory": "0"})
    differing = differences(dated(RIGHT, WRONG, both_wrong, RIGHT, RIGHT))
    assert [d.parts for d in differing] == [("bf16 products",), ("bf16 products", "memory")]


def test_gpus_of_one_host_have_a_vote_each_and_who_differs_from_itself_has_none():
    """GPUs of a host differ in their UUID."""
    first, second, third = (
        replace(d, device=f"GPU-{n}") for n, d in enumerate((RIGHT, WRONG, RIGHT), start=1)
    )
    on_one_host = [
        DatedDigest(1.7e9, "first", "n0", n, digest) for n, digest in enumerate((first, second, third))
    ]
    assert [(d.dated.number, d.against) for d in differences(on_one_host)] == [(1, Against.OTHERS)]
    unsteady = replace(WRONG, second={"bf16 products": "0"})
    differing = differences(dated(RIGHT, unsteady, unsteady, RIGHT, WRONG))
    assert [(d.dated.host, d.against) for d in differing] == [
        ("n1", Against.ITSELF), ("n2", Against.ITSELF), ("n4", Against.OTHERS)
    ]  # fmt: skip


def test_a_preflight_that_is_read_twice_confirms_nothing():
    verdict = host_verdicts(differences(dated(RIGHT, WRONG, RIGHT) * 2))["n1"]
    assert (verdict.is_confirmed, verdict.reason.endswith(" in 1 preflight")) == (False, True)


def test_of_two_gpus_that_differ_none_is_blamed():
    assert differences(dated(RIGHT, WRONG)) == []
    assert differences(dated(RIGHT, WRONG, RIGHT, WRONG)) == []


def test_gpus_of_different_drivers_are_not_compared():
    newer = replace(WRONG, setup="H100, driver 580")
    assert differences(dated(RIGHT, RIGHT, RIGHT, newer, newer)) == []
    assert differences(dated(RIGHT, RIGHT, RIGHT, newer)) == []


def test_a_gpu_is_compared_with_itself_and_with_its_past():
    unsteady = replace(RIGHT, second={"memory": "78"})
    assert blamed(differences(dated(unsteady))) == [("first", "n0", Against.ITSELF, ("memory",))]
    past = [
        *dated(RIGHT),
        *dated(WRONG, source="second", time_s=1.8e9),
        *dated(RIGHT, source="third", time_s=1.9e9),
    ]
    random.Random(3).shuffle(past)
    differing = differences(past)
    assert blamed(differing) == [("second", "n0", Against.PAST, ("bf16 products",))]
    assert differing[0].text.endswith("differently from itself on 2023-11-14")


def test_the_second_preflight_that_agrees_confirms():
    """It is the GPU that counts, which may have another number on another day."""
    preflights = [*dated(RIGHT, WRONG, RIGHT), *dated(RIGHT, WRONG, RIGHT, source="second", time_s=1.8e9)]
    verdict = host_verdicts(differences(preflights))["n1"]
    assert (verdict.is_confirmed, verdict.reason.endswith(" in 2 preflights")) == (True, True)
    renamed = [replace(d, device="GPU-5a2c1e77-0") for d in (RIGHT, WRONG)]
    differing = differences(
        [*dated(RIGHT, renamed[1], RIGHT)]
        + [d._replace(number=3) for d in dated(RIGHT, renamed[1], RIGHT, source="second", time_s=1.8e9)]
    )
    assert host_verdicts(differing)["n1"].is_confirmed
    assert differing[-1].text.startswith("GPU 3 (GPU-5a2c1e77) computed ")


def test_what_versions_and_damage_leave_out_is_no_digest():
    facts = [
        {"host": "n0"},
        {"host": "n1", "digests": [{}, 7, {"setup": 1}, {"setup": "x", "parts": {"a": "b"}}]},
        None,
    ]
    (only,) = dated_digests(facts, "first", None)
    assert (only.host, only.number, only.digest.parts) == ("n1", 3, {"a": "b"})
    assert [*dated_digests("?", "first", 1.0)] == []
