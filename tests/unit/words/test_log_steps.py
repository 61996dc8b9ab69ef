"""Which lines of a log count as steps, how long these take, and what is said against them.

The forms of the lines are those of transformers' Trainer, Megatron-LM, torchtitan, nanoGPT, Lightning and DeepSpeed.
"""

import math
import re

import pytest

from ultrabench.log_lines import LogLine, Sighting, split_log
from ultrabench.log_steps import (
    ArrivalTimer,
    DroppedLine,
    LoggedStep,
    StepLine,
    StepReader,
    StepSize,
    even_growth_s,
    log_doubts,
    pace_ratio,
)


def read(pattern, log):
    """The reader, the lines that count, and those that do not."""
    reader = StepReader(re.compile(pattern))
    lines = split_log(log) if isinstance(log, str) else log
    outcomes = [outcome for line in lines for outcome in reader.read(line)] + reader.finish()
    steps = [outcome for outcome in outcomes if isinstance(outcome, StepLine)]
    return reader, steps, [outcome for outcome in outcomes if isinstance(outcome, DroppedLine)]


BAR = r"(?P<seconds>[\d.]+)s/it"
TRAINER = (
    "\r  0%|          | 0/30 [00:00<?, ?it/s]\r  3%|# | 1/30 [00:01<00:30, "
    " 1.05s/it]\r          \r\r{'loss': 10.5, 'epoch': 0.1}\n"
    "\r  3%|# | 1/30 [00:01<00:30,  1.05s/it]\r  7%|# | 2/30 [00:02<00:29,  1.04s/it]\x1b[A\r{'loss': "
    "10.1, 'epoch': 0.2}\n"
    "\r  7%|# | 2/30 [00:02<00:29,  1.04s/it]\r 10%|# | 3/30 [00:03<00:29,  1.03s/it]\n"
)
MEGATRON = "".join(
    f" [2024-05-01 10:00:{n:02}] iteration {n:8}/ 100 | elapsed time per iteration (ms): "
    f"1000.{n} | lm loss: 2.{n}E+00 |\n"
    for n in (10, 20, 30)
)
RANKS = "".join(f"[rank{rank}]: step {n} time 0.4{rank} s\n" for n in (1, 2, 3) for rank in (0, 1))
EPOCHS = "".join(f"epoch {epoch} step {n} time 0.5 s\n" for epoch in (1, 2) for n in range(4))


@pytest.mark.parametrize(
    ("pattern", "log", "seconds"),
    [
        (r"\(ms\): (?P<milliseconds>[\d.]+)", "\x1b[32m\x1b[1m(ms)\x1b[0m: 500.5\x1b[0m\n", [0.5005]),  # codes inside
        (r"step: +\d+ .*took (?P<seconds>\S+)", "step:  1 \x1b[34mtook 0.5\x1b[0m\nstep:  2 took \x1b[1m0.6\x1b[0m",
            [0.5, 0.6]),
        (BAR, TRAINER, [1.05, 1.04, 1.03]),
        (BAR, "\r1/2 [00:01<00:01, 0.41s/it]\r1/2 [00:02<00:01, 0.45s/it, loss=3]\r2/2 [00:03<00:00, 0.41s/it]",
            [0.41, 0.41]),
        (BAR, "Epoch 0:  33%|#| 1/3 [00:00<00:00,  0.29s/it, v_num=0]\rEpoch 0:  66%|#| 2/3 [00:00<00:00, "
        " 0.29s/it, v_num=0]\r", [0.29, 0.29]),
        (BAR, "1/2 [00:01, 0.4s/it]\r2/2 [00:01, 0.4s/it]\n1/2 [00:01, 0.4s/it]\r1/2 [00:01, 0.4s/it, "
        "loss=2]\r2/2 [00:01, 0.4s/it]", [0.4] * 4),
        (r"step (?P<step>\d+) time (?P<seconds>\S+)", RANKS, [0.4, 0.4, 0.4]),
        (r"step (?P<step>\d+) time (?P<seconds>\S+)", EPOCHS, [0.5] * 8),
        (r"iteration +(?P<step>\d+).*\(ms\): (?P<milliseconds>\S+)", MEGATRON, [1.0001, 1.00020, 1.0003]),
        (r"step (?P<step>\d+) time (?P<seconds>\S+)", "step 10 time 4.1 s\nstep 20 time 4.2 s\nstep 30 time 4.0 s",
            [0.41, 0.42, 0.4]),
        (r"step (?P<step>\d+) time (?P<seconds>\S+)", "step 1 time 0.4 s\nstep 2 time 0.4 s\nstep 4 time 0.4 "
        "s\nstep 5 time 0.4 s", [0.4] * 4),
        (r"step (?P<step>\d+) step_time (?P<seconds>\S+)", "step 5 step_time 0.4\nstep 10 step_time 0.4", [0.4, 0.4]),
        # srun --label
        (r"(?P<seconds>\S+) s/step", "0: 0.50 s/step\n1: 0.50 s/step\n0: 0.51 s/step\n1: 0.51 s/step\n", [0.5, 0.51]),
        (r"took (?P<seconds>\S+) s", "took 0.5 s\ntook 0.5 s\n", [0.5, 0.5]),
        (r"time (?P<seconds>[\d.,]+) s loss (?P<loss>[\d.,]+)", "time 2,25 s loss 3,141\ntime 0,750 s loss 3,125\n",
            [2.25, 0.75]),
        (r"time (?P<seconds>[\d.,]+) s", "time 2,25 s\ntime 1,125 s\n", [2.25, 1.125]),
        (r"time (?P<seconds>[\d.,]+) s", "loss 2.71 time 1,125 s\nloss 2.72 time 1,126 s\n", [1125, 1126]),
        (r"in (?P<milliseconds>[\d.,]+) ms", "in 1.234,5 ms\nin 987,5 ms\n", [1.2345, 0.9875]),
    ],
)  # fmt: skip
def test_the_times_of_steps(pattern, log, seconds):
    _, steps, _ = read(pattern, log)
    assert [step.values["seconds"] for step in steps] == pytest.approx(seconds, rel=2e-4)


@pytest.mark.parametrize(
    ("pattern", "log", "losses"),
    [
        (r"time (?P<seconds>\S+) loss (?P<loss>\S+)", "time 0.4 loss 3.0\ntime 0.5 loss nan.0\ntime 0.6 loss "
        "N/A\ntime 0.7 loss inf", [3.0, math.nan, math.nan, math.inf]),
        (r"time (?P<seconds>\S+)(?: loss (?P<loss>\S+))?", "time 0.4 loss 3.0\ntime 0.5\ntime 0.6 loss --",
            [3.0, None, math.nan]),
        (r"loss=(?P<loss>[^ ,}]+).* (?P<seconds>\S+) s", "loss=None, 0.5 s\nloss=tensor(2.5), 0.6 s",
            [math.nan, math.nan]),
        (r"time (?P<seconds>\S+) loss (?P<loss>\S*)", "time 0.4 loss \ntime 0.5 loss 3.125", [None, 3.125]),
        # Groups that want digits, with the loss optional or not, and in a set of brackets.
        (r"time (?P<seconds>[\d.]+)( loss (?P<loss>[\d.]+))?",
            "time 0.4 loss 3.0\ntime 0.5 loss nan\ntime 0.6 loss -inf", [3.0, math.nan, -math.inf]),
        (r"time (?P<seconds>[\d.]+) loss (?P<loss>[\d.]+)", "time 0.4 loss 3.0\ntime 0.5 loss NaN,\ntime 0.6 loss N/A",
            [3.0, math.nan, math.nan]),
        (r"loss (?P<loss>\d+[.\])]\d+) time (?P<seconds>[\d.]+)", "loss 3.0 time 0.4\nloss nan time 0.5",
            [3.0, math.nan]),
        (r"loss (?P<loss>[\d.]+) time (?P<seconds>[\d.]+)", "loss 3.0 time 0.4\nloss of validation time 0.5", [3.0]),
    ],
)  # fmt: skip
def test_a_loss_that_cannot_be_read_is_nan_and_keeps_its_step(pattern, log, losses):
    _, steps, dropped = read(pattern, log)
    assert dropped == []
    assert [step.values.get("loss") for step in steps] == pytest.approx(losses, nan_ok=True)


@pytest.mark.parametrize(
    ("pattern", "log", "reason"),
    [
        (r"(?P<seconds>[\d.]+)it/s", "2.1it/s", "the unit of '2.1' is step/s, which the group seconds does not "
        "read; use the group (?P<steps_per_s>...)"),
        (r"(?P<seconds>[\d.]+) steps per second", "12.5 steps per second", "use the group (?P<steps_per_s>...)"),
        (r"time (?P<seconds>[\d.]+)", "time 123.45ms, mfu 12.3%",
            "is ms, which the group seconds does not read; use the group (?P<milliseconds>...)"),
        (r"time (?P<milliseconds>[\d.]+)", "time 0.41 s", "use the group (?P<seconds>...)"),
        (r"(?P<seconds>[\d.]+),", "CurrSamplesPerSec=12.4, MemAllocated=1.0GB", "use the group (?P<samples_per_s>...)"),
        (r"(?P<tokens_per_s>[\d.]+) tok", "12.4 tok/s/gpu", "use the group (?P<tokens_per_s_per_gpu>...)"),
        (r"(?P<samples_per_s>[\d.]+)", "345.6 tokens/s", "use the group (?P<tokens_per_s>...) or "
        "(?P<tokens_per_s_per_gpu>...)"),
        # Durations of several parts, minutes, and suffixes behind a space.
        (r"time (?P<seconds>[\d.]+)", "time 1m02s", "only a part of '1m02s'"),
        (r"time: (?P<seconds>[\d.]+)", "time: 1 m 2 s", "only a part of '1 m 2 s'"),
        (r"m (?P<seconds>[\d.]+)s", "(2m 5.3s)", "only a part of '2m 5.3s'"),
        (r"time: (?P<seconds>[\d.]+)", "time: 1m", "the unit of '1' is min"),
        (r"(?P<tokens_per_s>[\d.]+) k", "72.1 k tok/s", "only a part of '72.1 k'"),
        # Units before a number need no colon.
        (r"tok/s/gpu (?P<tokens_per_s>[\d.]+)", "tok/s/gpu 9000", "use the group (?P<tokens_per_s_per_gpu>...)"),
        (r"tgs (?P<tokens_per_s>[\d.]+)", "loss 3 tgs 9000", "use the group (?P<tokens_per_s_per_gpu>...)"),
        (r"ms/step (?P<seconds>[\d.]+)", "ms/step 250.5", "use the group (?P<milliseconds>...)"),
        (r"(?P<seconds>[\d.]+)", "0.5 s/sample", "no group reads it"),
        (r"time (?P<seconds>[\d.]+)", "time 1,53 s", "the group seconds matches '1', "
        "which is only a part of '1,53'; let it match the whole"),
        (r"time (?P<milliseconds>[\d.]+)", "time 4.71K", "matches '4.71', which is only a part of '4.71K'"),
        (r"loss (?P<loss>[\d.]+).*time (?P<seconds>[\d.]+)", "loss 2.5E-01 time 0.4",
            "the group loss matches '2.5', which is only a part of '2.5E-01'"),
        (r"time (?P<seconds>[\d.,]+) s", "time 1,530 s", "'1,530' may be 1.53 or 1530, "
        "and nothing else in the line shows which"),
    ],
)  # fmt: skip
def test_a_number_of_another_quantity_is_misread_not_taken(pattern, log, reason):
    _, steps, (dropped,) = read(pattern, log)
    assert (steps, dropped.kind) == ([], "misread")
    assert reason in dropped.reason


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({"seconds": 0.5}, 0.5), ({"steps_per_s": 4.0}, 0.25), ({"samples_per_s": 16.0}, 0.5),
        ({"tokens_per_s": 4096.0}, 2.0),
        ({"tokens_per_s_per_gpu": 4096.0}, 0.5), ({"loss": 1.0}, None),
    ],
)  # fmt: skip
def test_a_rate_gives_the_time_of_a_step(values, seconds):
    assert StepSize(tokens=8192, samples=8, gpus=4).seconds(values) == seconds


@pytest.mark.parametrize(
    ("pattern", "log", "lines_per_step"),
    [
        (r"time (?P<milliseconds>\S+) ms", "".join(f"iter {n} step {n // 4} time 500.{n} ms\n" for n in range(8)), 4),
        (r"step (?P<step>\d+) .*time (?P<seconds>\S+)", "".join(f"step {n // 3} mb {n % 3} time "
        f"0.{51 + n} s\n" for n in range(9)), 3),
        (r"dt (?P<seconds>\S+)", "".join(f"global_step={n // 2} micro={n} dt 0.5\n" for n in range(8)), 2),
        (r"dt (?P<seconds>\S+)", "".join(f"micro-batch {n % 4 + 1}/4 dt 0.5{n}\n" for n in range(12)), 4),
        (r"Per=(?P<samples_per_s>\S+)", "".join(f"micro_step={8 * n}/global_step={n}, Per=12.{n}\n" for n in range(1,
            9)), 1),
        (r"dt (?P<seconds>\S+)", "".join(f"max step 100 | step {n} | dt 0.5\n" for n in range(8)), 1),
        (BAR, TRAINER, 1), (r"step (?P<step>\d+) time (?P<seconds>\S+)", RANKS, 1),
    ],
)  # fmt: skip
def test_lines_of_micro_batches_show_the_same_step(pattern, log, lines_per_step):
    reader, _, _ = read(pattern, log)
    assert reader.lines_per_step == lines_per_step


@pytest.mark.parametrize(
    ("pattern", "text", "stride", "num_parts"),
    [
        (r"took (?P<seconds>\S+)", "step {n}0 took 61.{n} s", 10, 0),
        (r"took (?P<seconds>\S+)", "step {n} took 61.{n} s", 1, 0),
        (r"took (?P<seconds>\S+)", "iter {n} of step 1 took 61.{n} s", 1, 0),
        (r"loss (?P<loss>\S+)", "update={n}00 loss 2.{n}", 100, 0),
        (r"rate (?P<steps_per_s>\S+)", "step {n}0 rate 0.{n}", 1, 0),
        (r"step (?P<step>\d+) took (?P<seconds>\S+)", "step {n}0 took 61.{n} s", 1, 0),
        (r"took (?P<seconds>\S+)", "the last 25 steps took 61.{n} s", 25, 0),
        (r"backward: (?P<milliseconds>\S+)", "forward: 20{n}.5 | backward: 41{n}.5 ms", 1, 5),
        (r"\| step: (?P<milliseconds>\S+)", "fwd: 20{n}.5 | bwd: 41{n}.5 | step: 9.{n}", 1, 5),
        (r"\| step: (?P<milliseconds>\S+)", "fwd: 20{n}.5 | bwd: 41{n}.5 | step: 69{n}.5", 1, 0),
        (r"data_loading_s=(?P<seconds>\S+)", "data_loading_s=0.{n} total=1.{n}", 1, 5),
    ],
)  # fmt: skip
def test_lines_for_several_steps_and_times_of_parts_are_noticed(pattern, text, stride, num_parts):
    reader, _, _ = read(pattern, "".join(text.format(n=n) + "\n" for n in range(1, 6)))
    assert (reader.uncounted_stride, reader.num_parts) == (stride, num_parts)


def test_states_of_a_bar_in_the_inverse_unit_are_unread():
    bars = [f"{n}/6 [00:0{n}<00:09, {rate}]" for n, rate in enumerate(["?it/s", "1.4s/it", "1.2it/s"] * 2)]
    _, _, dropped_lines = read(r"(?P<seconds>[\d.]+)s/it", "\r".join([*bars, "val: 9.1it/s", ""]))
    assert [(d.number, d.kind, d.reason) for d in dropped_lines] == [
        (n, "unreadable", "the bar is in it/s, the pattern reads s/it") for n in (3, 6)
    ]


def at(times_s, text="step {n} took {seconds} s", seconds=0.5, error_s=0.01):
    """Lines that arrived at these times."""
    return [
        LogLine(text.format(n=n, seconds=seconds), Sighting(time_s, error_s))
        for n, time_s in enumerate(times_s)
    ]


def test_a_suffix_behind_a_space_and_a_smallest_value_are_read():
    _, steps, _ = read(r"(?P<tokens_per_s>[\d.]+ M)", "1.2 M tok/s")
    assert steps[0].values["tokens_per_s"] == pytest.approx(1.2e6)
    _, steps, _ = read(r"time (?P<seconds>[\d.]+)", "time 0.41 min 0.40 max 0.43\ntime 0.5 m 7 loss 3")
    assert [step.values["seconds"] for step in steps] == [0.41, 0.5]


def test_equal_texts_count_once_within_half_a_step_and_twice_after_it():
    lines = at((0, 0.02, 0.5, 0.55, 1.0), text="took {seconds} s")
    _, steps, dropped = read(r"took (?P<seconds>\S+) s", lines)
    assert [step.sighting.at_s for step in steps] == [0, 0.5, 1.0]
    assert "the same text came less than half a step before" in dropped[0].reason
    _, steps, _ = read(r"took (?P<seconds>\S+) s", at((0, 0.02, 0.04)))  # their numbers differ
    assert len(steps) == 3


def test_equal_texts_without_a_time_count_once_within_half_the_usual_distance():
    lines = [LogLine("step done", Sighting(time_s, 0.05)) for time_s in (0, 1, 1.1, 2, 2.1, 3.05, 3.1, 4)]
    _, steps, _ = read("step done", lines)
    assert [step.sighting.at_s for step in steps] == [0, 1, 2, 3.05, 4]


def test_the_numbers_of_the_log_decide_before_others_of_a_line():
    _, steps, _ = read(r"time (?P<seconds>[\d.,]+) s", "time 1,25 s\nrun 0.5: time 1,125 s\n")
    assert [step.values["seconds"] for step in steps] == [1.25, 1.125]


@pytest.mark.parametrize(("distance_s", "seconds"), [(5.0, 0.5), (0.5, 0.05)])
def test_the_distance_of_lines_says_whether_a_time_is_of_all_their_steps(distance_s, seconds):
    lines = [LogLine(f"step {10 * n} took 0.5 s", Sighting(n * distance_s, 0.01)) for n in range(1, 5)]
    _, steps, _ = read(r"step (?P<step>\d+) took (?P<seconds>\S+) s", lines)
    assert [(step.values["seconds"], step.num_steps) for step in steps] == [(pytest.approx(seconds), 10)] * 4


def timed(lines, looks):
    """The times of steps by arrival; `looks` has the number of lines that each look at the log found."""
    reader, timer, times = StepReader(re.compile(r"step (?P<step>\d+)")), ArrivalTimer(), []
    for num_lines in looks:
        batch, lines = lines[:num_lines], lines[num_lines:]
        times += timer.add([step for line in batch for step in reader.read(line)])
    return timer, times


def test_n_lines_give_n_minus_1_times_with_the_error_of_the_looks():
    _, times = timed(at((1.0, 1.5, 2.1, 2.6)), [1, 1, 1, 1])
    assert [t.seconds for t in times] == pytest.approx([0.5, 0.6, 0.5])
    assert {(t.error_s, t.num_together) for t in times} == {(0.01, 1)}


def test_lines_that_arrive_together_share_the_time():
    _, times = timed(at((1.0, 2.0, 2.0, 3.0)), [1, 2, 1])
    assert [(t.seconds, t.num_together) for t in times] == [(0.5, 2), (0.5, 2), (1.0, 1)]
    timer, times = timed(at((1.0, 1.0, 1.0)), [3])
    assert (times, timer.num_untimed) == ([], 2)


def test_a_line_for_several_steps_is_divided_by_their_number():
    lines = [LogLine(f"step {n}", Sighting(n / 10, 0.01)) for n in (10, 20, 25)]
    _, times = timed(lines, [1, 1, 1])
    assert [(t.seconds, t.line.num_steps) for t in times] == [
        (pytest.approx(0.1), 10),
        (pytest.approx(0.1), 5),
    ]


def logged(times_s, seconds, num_together=1):
    return [LoggedStep(seconds, 1, Sighting(time_s, 0.05), num_together) for time_s in times_s]


@pytest.mark.parametrize(
    ("times_s", "seconds", "facts", "codes"),
    [
        (range(8), 1.0, {}, []), (range(8), 0.25, {"gas": 4}, ["micro_batches"]),
        (range(8), 0.25, {"gas": 1}, ["log_pace"]),
        (range(8), 0.1, {"gas": 4}, ["log_pace"]), (range(8), 153.0, {"gas": 4}, ["log_pace"]),
        (range(8), 0.8, {"gas": 2}, []),
        ([0] * 8, 0.25, {"gas": 4}, []),  # all lines arrived together, so that their distance says nothing
        ([*range(7), 60], 1.0, {}, []),  # a pause for a checkpoint
        (range(8), 1.0, {"gas": 4, "num_steps_asked": 2}, ["micro_batches"]),
        (range(8), 1.0, {"gas": 4, "num_steps_asked": 8}, []),
        (range(8), 1.0, {"gas": 1, "num_steps_asked": 2}, []),
        (range(8), 1.0, {"lines_per_step": 4.0}, ["micro_batches"]),
        (range(8), 1.0, {"uncounted_stride": 4}, ["strided_lines"]), (range(8), 0.25, {"uncounted_stride": 4}, []),
        (range(2), 1.0, {"uncounted_stride": 4}, ["strided_lines"]),
        (range(8), 1.0, {"num_parts": 2}, ["part_of_step"]),
        (range(2), 1.0, {"uncounted_stride": 4, "are_of_one_step": True}, []),
        (range(8), 1.0, {"num_unread": 1}, []), (range(8), 1.0, {"num_unread": 10}, ["unread_lines"]),
    ],
)  # fmt: skip
def test_doubts_about_times_that_lines_print(times_s, seconds, facts, codes):
    doubts = log_doubts(logged(times_s, seconds), by_arrival=False, num_lines=8, **facts)
    assert [*doubts] == codes


def test_bursts_of_lines_are_in_doubt():
    steps = logged((1, 2, 3), 1.0) + logged((4, 4), 0.5, num_together=2)
    doubts = log_doubts(steps, by_arrival=True)
    assert doubts["arrival_burst"].startswith("2 of 5 lines arrived with others, up to 2 at once")
    assert log_doubts(logged((1, 2, 3), 1.0), by_arrival=True) == {}
    few_lines = log_doubts(logged((1, 2, 3), 1.0), by_arrival=True, num_lines=3, num_steps_asked=30)
    assert few_lines["strided_lines"].startswith("3 lines for 30 steps, and each counts as one")


def test_the_pace_needs_lines_that_are_apart():
    assert pace_ratio(logged(range(3), 1.0)) is None
    assert pace_ratio(logged((0, 0.1, 0.2, 0.3, 0.4), 0.1)) is None  # within the error of their arrival
    assert pace_ratio(logged(range(5), 0.5)) == pytest.approx(2)


@pytest.mark.parametrize(
    ("times_s", "growth_s"),
    [
        ([10.1, 20.2, 30.2, 40.3, 50.4], 10.1), ([100, 101, 102, 103.1, 110, 121], None),
        ([0.5, 0.5001, 0.5002, 0.5003, 0.5004], None),
        ([20 + n for n in range(6)], 1), ([1, 2, 3], None), ([5, 1, 1, 1, 1], None),
    ],
)  # fmt: skip
def test_times_since_the_start_of_the_program_are_in_doubt(times_s, growth_s):
    found = even_growth_s(times_s)
    assert found == (growth_s if growth_s is None else pytest.approx(growth_s, rel=0.02))
    doubts = log_doubts([LoggedStep(s, 1, Sighting(0, 0)) for s in times_s], by_arrival=False)
    assert ("growing_times" in doubts) == (growth_s is not None)
    doubts = log_doubts([LoggedStep(1 / s, 1, Sighting(0, 0)) for s in times_s], by_arrival=False)
    assert ("growing_rates" in doubts) == (growth_s is not None)
