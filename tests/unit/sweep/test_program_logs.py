"""What the patterns of configs/kernel/torchtitan.yaml, megatron.yaml, nanotron.yaml and of a user read in a log.

The lines are quoted from published logs, whose addresses are in tests/fixtures/logs; ON_CPUS is from torchtitan 0.3.0
as it ran under ultrabench.
"""

import re
from pathlib import Path

import pytest

from tests.configs import refused
from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.log_lines import LogLine, split_log
from ultrabench.log_patterns import (
    LOG_PATTERNS,
    OBSERVED_EVENT,
    MisreadError,
    compile_pattern,
    parse_log_line,
    quantities,
)
from ultrabench.log_steps import StepReader, StepSize
from ultrabench.sweep.config.load import load_config

ON_CPUS = (
    "[titan] 2026-11-21 16:03:54,469 - root - INFO - step:  3  loss:  6.29930  grad_norm:  3.2757  "
    "memory: -0.00GiB(-0.00%)  tps: 39  tflops: 0.00  mfu: 0.00%"
)
OTHERS = (
    "[titan] 2026-11-21 15:53:23,735 - root - INFO - Training starts at step 1",
    "[titan] 2025-07-21 15:57:42,774 - root - INFO - validate step: 10  loss:  4.9925  memory:  0.00GiB(0.00%)  tps: 9",
    "(min, max) time across ranks (ms): forward-backward: (5444.9, 5445.0)",
)
LOGS = Path(__file__).parents[2] / "fixtures/logs"
MIB, GIB = 2.0**20, 2.0**30
STEPS = {
    "torchtitan": [(4096 / 5856, 6.1384), (4096 / 10050, 7.62585), (4096 / 7282, 3.24405)],
    "megatron": [(5.6301, 2.02153), (0.744, 1.020935), (3.1274, 8.41732), (3.0982, 8.390117)],
    "nanotron": [(4.71, 5.32), (0.00915, 5.27), (11.5, 2.38)],
}
PEAKS = {
    "torchtitan": (round(66.91 * GIB), None), "megatron": (61480 * MIB, round(54250.98583984375 * MIB)),
    "nanotron": (496 * MIB, round(309.29 * MIB)),
}  # fmt: skip
"""Peaks of reserved and allocated bytes."""


SIZE = StepSize(tokens=4096, samples=1, gpus=1)


def read_log(kernel, lines):
    """What is read in the log of a rank: the lines of its steps, and the progress with the rest."""
    progress, steps = RankProgress(), []
    for option in LOG_PATTERNS:
        if text := getattr(kernel, option):
            pattern = compile_pattern(option, text)
            if option == "step_line":
                reader = StepReader(pattern)
                steps = [step for line in split_log("\n".join(lines)) for step in reader.read(line)]
                steps += reader.finish()
                continue
            for line in filter(None, (parse_log_line(line, pattern, option) for line in lines)):
                progress.record_observed(line)
    return steps, progress


@pytest.mark.parametrize("name", STEPS)
def test_published_logs_tell_time_loss_memory_and_mfu(name):
    kernel = load_config([f"kernel={name}", "model=8B"]).kernel
    lines = [line for line in (LOGS / f"{name}.txt").read_text().splitlines() if line[0] != "#"]
    steps, progress = read_log(kernel, lines)
    read = [(SIZE.seconds(step.values), step.values["loss"]) for step in steps]
    assert read == [(pytest.approx(seconds), loss) for seconds, loss in STEPS[name]]
    assert (progress.memory_report["reserved_bytes"], progress.memory_report.get("allocated_bytes")) == PEAKS[
        name
    ]
    mfus = [0.3429, 0.1399, 0.0017] if name == "torchtitan" else []
    assert progress.mfus == pytest.approx(mfus)
    nothing, progress = read_log(kernel, OTHERS)
    assert (nothing, progress.memory_report, progress.mfus) == ([], {}, [])


def test_a_line_of_torchtitan_without_memory_and_mfu_is_a_step():
    kernel = load_config(["kernel=torchtitan", "model=8B"]).kernel
    (step,), progress = read_log(kernel, [ON_CPUS.replace("mfu: 0.00%", "mfu: N/A")])
    assert (SIZE.seconds(step.values), step.values["loss"]) == (pytest.approx(4096 / 39), 6.2993)
    assert (progress.memory_report, progress.mfus) == ({}, [])


@pytest.mark.parametrize(
    ("options", "rank"),
    [({}, None), ({"step_rank": 0}, 0), ({"step_rank": -1}, 23), ({"step_rank": "last_stage"}, 16),
     ({"step_rank": "last_stage", "rank_order": ("tp", "cp", "pp", "dp")}, 4)],
)  # fmt: skip
def test_the_rank_whose_log_has_the_steps_follows_from_the_layout(options, rank):
    kernel = KernelConfig(name="x", kind="command", command=("x",), **options)
    assert kernel.logging_rank(Layout(dp=4, tp=2, pp=3, pp_schedule="afab")) == rank


@pytest.mark.parametrize(
    ("text", "option", "quantities"),
    [
        ("peak 1,024 bytes", r"peak (?P<allocated_bytes>\S+) bytes", {"allocated_bytes": 1024}),
        ("peak 1.5 GB", r"peak (?P<reserved_gb>\S+) GB", {"reserved_bytes": 1_500_000_000}),
        ("peak 1.5 MB", r"peak (?P<reserved_mb>\S+) MB", {"reserved_bytes": 1_500_000}),
        ("peak 547M", r"peak (?P<reserved_bytes>\S+)", {"reserved_bytes": 547_000_000}),
        ("peak 1.5 GiB", r"peak (?P<reserved_gib>\S+) GiB", {"reserved_bytes": round(1.5 * GIB)}),
        ("peak -0.0 GiB", r"peak (?P<reserved_gib>\S+) GiB", None),
        ("peak nan GiB", r"peak (?P<reserved_gib>\S+) GiB", None),
        ("peak N/A GiB", r"peak (?P<reserved_gib>\S+) GiB", None),
    ],
)  # fmt: skip
def test_the_group_names_the_unit_of_memory(text, option, quantities):
    line = parse_log_line(text, compile_pattern("memory_line", option), "memory_line")
    assert line == (quantities and {"event": OBSERVED_EVENT, **quantities})


@pytest.mark.parametrize(
    ("option", "pattern", "text", "fact"),
    [
        ("step_line", r"eta (?P<seconds>\S+)", "step 3 took 1.5 s, eta 300 s", "the label of '300' is 'eta'"),
        ("step_line", r"loss (?P<seconds>\S+)", "step 3 loss 2.5 took 1.5 s", "the label of '2.5' is 'loss'"),
        ("step_line", r"lr: (?P<seconds>\S+)", "lr: 3e-4 took 1.5 s", "the label of '3e-4' is 'lr'"),
        ("step_line", r"took (?P<seconds>\S+)", "loss nan took 1.5 s", None),
        ("step_line", r"(?P<tokens_per_s>\d+) tok", "80 tok/s/node", "the unit of '80' is token/s/node"),
        ("step_line", r"speed (?P<tokens_per_s>\d+)", "speed 80 641 | step 3",
            "'80', which is only a part of '80 641'"),
        ("step_line", r"speed (?P<tokens_per_s>\d+)", "speed 80641 125 s", None),
        ("step_line", r"tokens_per_s: (?P<tokens_per_s_per_gpu>\d+)", "tokens_per_s: 800 | tokens_per_s_per_gpu: 100",
            "another number that is of one GPU"),
        ("step_line", r"tokens_per_s_per_gpu: (?P<tokens_per_s_per_gpu>\d+)",
            "tokens_per_s: 800 | tokens_per_s_per_gpu: 100", None),
        ("step_line", r"per_sec: (?P<tokens_per_s>\d+)", "throughput/samples_per_sec: 64",
            "the unit of '64' is sample/s"),
        ("step_line", r"per_sec: (?P<tokens_per_s>\d+)", "throughput/device/tokens_per_sec: 64",
            "the unit of '64' is token/s/gpu"),
        ("loss_line", r"scale: (?P<loss>\S+)", "loss: 2.5 | loss scale: 65536.0",
            "the label of '65536.0' is 'loss scale'"),
        ("mfu_line", r"fu (?P<fraction>\S+)", "hfu 0.5 mfu 0.4", "the label of '0.5' is 'hfu'"),
        ("memory_line", r"allocated: (?P<reserved_gib>\S+)", "max allocated: 40.5 GiB reserved: 61.5 GiB",
            "is 'max allocated', which"),
        ("memory_line", r"reserved: (?P<reserved_gib>\S+)", "max allocated: 40.5 GiB reserved: 61.5 GiB", None),
        ("memory_line", r"mem (?P<reserved_gib>\d+)", "mem 84%", "the unit of '84' is %"),
    ],
)  # fmt: skip
def test_a_number_with_the_label_or_unit_of_another_quantity_is_not_read(option, pattern, text, fact):
    match = compile_pattern(option, pattern).search(text)
    if fact is None:
        assert quantities(option, match)
        return
    with pytest.raises(MisreadError, match=re.escape(fact)):
        quantities(option, match)


@pytest.mark.parametrize(
    ("option", "pattern", "line"),
    [
        ("step_line", "(?P<secs>.)", r"kernel\.step_line=.* has a group 'secs'; its groups are seconds, milliseconds"),
        ("loss_line", "(?P<step>.)", r"kernel\.loss_line=.* lacks a group; add one of \(\?P<loss>"),
        ("memory_line", "(?P<gib>.)", r"kernel\.memory_line=.* lacks a group; add one of .*reserved_gib"),
        ("mfu_line", "(?P<mfu>.)", r"kernel\.mfu_line=.* lacks a group; add one of .*fraction.*percent"),
        ("mfu_line", "(", r"kernel\.mfu_line='\(' is not a regular expression"),
    ],
)  # fmt: skip
def test_a_pattern_needs_a_group_that_says_what_it_reads(option, pattern, line):
    with refused(match=line):
        KernelConfig(name="x", kind="command", command=("x",), **{option: pattern})


def test_the_loss_is_read_by_one_pattern():
    patterns = {"step_line": r"(?P<seconds>\S+) s, loss (?P<loss>\S+)", "loss_line": "loss (?P<loss>.)"}
    with refused("kernel.loss_line and the group loss of kernel.step_line read the same; give one of them"):
        KernelConfig(name="x", kind="command", command=("x",), **patterns)


def test_a_time_that_is_no_time_is_not_a_step():
    for text in ("tps: 0", "tps: ,"):
        reader = StepReader(re.compile(r"tps: (?P<tokens_per_s_per_gpu>[\d,]+)"))
        (dropped,) = reader.read(LogLine(text))
        assert (dropped.kind, reader.num_counted) == ("unreadable", 0)
