"""What a program writes to its report may be anything: it costs that run at most, never the agent."""

import json
import math
import os
import re
import struct
import time
from dataclasses import replace

import pytest

from tests.configs import measure
from tests.unit.agent.one_node import task
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.ranks.rank_progress import MAX_KEPT_STEPS, AttemptProgress
from ultrabench.log_lines import LogLine
from ultrabench.log_patterns import nearest_lines
from ultrabench.log_steps import StepReader
from ultrabench.rank_report import NewLines, Progress, Report, parse_line, read_progress
from ultrabench.record import canonical_json, to_dict
from ultrabench.result import Status
from ultrabench.run import env_id
from ultrabench.step_time import ci95_rel

MEASURE = measure(warmup_steps=2, min_steps=6, max_steps=8, loss_step=5)
TASK = replace(task("x.py", "cpu"), measure=MEASURE)
STEP = parse_line('{"event": "step", "seconds": 0.0123456789, "loss": 1.5}')


def judged(*texts, rank=3, steps=9):
    """The result of a run of 4 ranks that is healthy but for these lines of one rank; it can be written."""
    progress, ranks = AttemptProgress(4, ("n0", "n1")), range(4)
    progress.add([{"rank": r, "line": STEP} for r in ranks for _ in range(steps)])
    progress.add([{"rank": rank, "line": line} for line in map(parse_line, texts) if line])
    progress.add([{"rank": r, "code": 0, "tail": ""} for r in ranks])
    env_id(progress.environment, TASK.spec.kernel, "")
    result = classify(progress, TASK, None)
    return result, canonical_json(to_dict(result)).encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [("0.0", "0.0"), ("1e308", "1e+308"), ("-1", "-1"), ("NaN", "nan"), ("Infinity", "inf"), ("1" * 400, "1" * 60),
     ('"fast"', "'fast'"), ("[1, 2]", "[1, 2]"), ("{}", "{}"), ("true", "True"), ("1e-320", "1e-320")],
)  # fmt: skip
def test_seconds_that_are_none_make_the_run_invalid_and_name_the_rank(text, shown):
    result, _ = judged(f'{{"event": "step", "seconds": {text}}}')
    assert (result.status, result.cause, result.suspect_hosts) == (Status.INVALID, "bad_report", ())
    assert result.reason == f"rank 3 reported step seconds={shown}: not a number of seconds"


@pytest.mark.parametrize(
    "text", ['{"event": "step", "loss": ' + "[" * 100_000, "[" * 100_000, '{"a": ' + "1" * 5000 + "}"]
)
def test_a_line_that_no_reader_can_take_in_makes_the_run_invalid(text):
    result, _ = judged(text)
    assert (result.status, result.cause) == (Status.INVALID, "bad_report")
    assert result.reason.startswith("rank 3 reported an unreadable line: ")


FIELDS = {"memory": ("allocated_bytes", "reserved_bytes"), "done": ("hardware_flops_per_step", "stopped", "graphs"),
          "environment": ("omp_num_threads", "gpu_name", "variables"), "store": ("port",), "phase": ("name", "time"),
          "stack_dump": ("pid",), "error": ("kind", "message", "traceback"), "other": ("x",)}  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, 10**400, "x", [1], {"a": 1}, True, -1, 99_999_999, "\ud800", "y" * 2**20],
    ids=lambda value: repr(value)[:12],
)
@pytest.mark.parametrize(("event", "name"), [(e, n) for e, names in FIELDS.items() for n in names])
@pytest.mark.parametrize("rank", [0, 3])
def test_any_value_in_any_field_leaves_a_result_that_can_be_written(event, name, value, rank):
    result, written = judged(json.dumps({"event": event, name: value}), rank=rank)
    assert (result.status == Status.OK) == (event != "error")
    assert len(written) < 10_000


def test_long_words_are_cut_in_the_middle():
    line = parse_line(json.dumps({"event": "error", "message": "first " + "x" * 2**20 + " last"}))
    assert len(line["message"]) < 20_000
    assert line["message"].startswith("first ")
    assert line["message"].endswith(" last")


def test_news_that_cannot_be_taken_in_cost_the_run_only():
    progress = AttemptProgress(2, ("n0", "n1"))
    progress.add([{"rank": 1, "line": None}, {"rank": 0, "code": 0}, {"rank": 1, "code": 0}])
    assert progress.has_failed
    result = classify(progress, TASK, None)
    assert (result.status, result.suspect_hosts) == (Status.INVALID, ())


def test_sixty_thousand_steps_are_judged_at_once_and_stay_a_line_of_bounded_length():
    began = time.process_time()
    result, written = judged(steps=60_000)
    assert (result.status, len(result.step_times_s)) == (Status.OK, MAX_KEPT_STEPS - MEASURE.warmup_steps)
    assert len(written) < 200_000
    assert time.process_time() - began < 20


@pytest.mark.parametrize("text", ["step inf s", "step nan s", "step 1e999 s", "step 0 s", "step -3 s"])
def test_a_logged_step_has_to_take_a_number_of_seconds(text):
    (dropped,) = StepReader(re.compile(r"step (?P<seconds>\S+) s")).read(LogLine(text))
    assert dropped.kind == "no_time"


def read_all(lines):
    texts = lines.read()
    while lines.has_more:
        texts += lines.read()
    return texts


def test_a_rank_that_inherits_the_report_of_another_one_has_its_own(tmp_path, monkeypatch):
    for path, rank, name in [
        ("rank2.report", "3", "rank3.report"),
        ("rank2.report", None, "rank2.report"),
        ("x", "3", "x"),
    ]:
        monkeypatch.setenv("ULTRABENCH_REPORT", str(tmp_path / path))
        monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
        report = Report.from_environment()
        report._file.close()
        assert report.path == str(tmp_path / name)


def test_all_lines_are_read_once_in_bounded_parts_and_one_that_is_too_long_is_skipped(tmp_path):
    path, max_bytes = tmp_path / "report", 64
    written = [f"{n:07d}" for n in range(100)]
    skipped = "x" * (400 * max_bytes)  # longer than what one call skips
    path.write_text("\n".join([*written, skipped, "last", "begun"]))
    lines = NewLines(path, max_bytes)
    first = lines.read()
    assert sum(map(len, first)) <= max_bytes
    assert lines.has_more
    assert first + read_all(lines) == [*written, "last"]
    with path.open("a") as file:
        file.write(" and ended\n")
    assert lines.read() == ["begun and ended"]
    assert (lines.num_lines, lines.num_skipped) == (103, 1)


def test_what_is_no_file_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "endless", "none"):
        assert NewLines(tmp_path / name).read() == []
        (tmp_path / f"{name}.progress").symlink_to(tmp_path / name)
        assert read_progress(tmp_path / name) == Progress()


@pytest.mark.parametrize("numbers", [(-1, 2, 0), (1, -2, 0), (1, 2, -1)])
def test_progress_is_not_negative(tmp_path, numbers):
    (tmp_path / "report.progress").write_bytes(struct.pack("@qqq", *numbers))
    assert read_progress(tmp_path / "report") == Progress()


def test_garbage_lists_and_texts_are_no_lines(tmp_path):
    others = '\n[]\n"text"\n5\nnull\n{"seconds": 1}\n{"event": "done"}\n'
    (tmp_path / "report").write_bytes(os.urandom(2**20) + others.encode())
    events = [line for line in map(parse_line, read_all(NewLines(tmp_path / "report"))) if line]
    assert events == [{"event": "done"}]


@pytest.mark.parametrize("n", [6, 7, 50, 1023, 1024, 2000])
def test_the_interval_lies_between_the_ranks_that_exact_numbers_give(n):
    tail, k = 0, 0
    while 40 * 2 * (tail := tail + math.comb(n, k)) <= 2 * 2**n:
        k += 1
    times = [float(i) for i in range(1, n + 1)]
    assert ci95_rel(times) == pytest.approx((times[n - k] - times[k - 1]) / 2 / ((n + 1) / 2))


def test_steps_of_no_time_have_no_interval():
    assert ci95_rel([0.0] * 10) is None


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        (
            r"elapsed time \(s\): (?P<seconds>\S+)",
            ["step 3 elapsed time (ms): 25", "read 4 files in no time"],
        ),
        (r"files (?P<seconds>\d+)", ["read 4 files in no time", "step 3 elapsed time (ms): 25"]),
        (r"(?P<seconds>\d+)x", ["read 4 files in no time", "step 3 elapsed time (ms): 25"]),
    ],
)
def test_the_nearest_lines_share_words_with_the_pattern_and_hold_a_number(pattern, nearest):
    log = (
        "elapsed time\nstep 1 elapsed time (ms): 30\nstep 3 elapsed time (ms): 25\nread 4 files in no time\n"
    )
    assert nearest_lines(log, pattern) == nearest
