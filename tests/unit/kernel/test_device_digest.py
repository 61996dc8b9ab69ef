"""What equal GPUs compute bit by bit, tried on a CPU, and which of them are blamed for differences."""

import random
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

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
from ultrabench.kernel.rank import digest_chain

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
    for part in digest_chain.parts_of(CPU).values():
        assert part(0).double().isfinite().all()


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
