"""What the agent reads in a log while its program runs, and the result that follows."""

import math
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.configs import measure, refused
from tests.unit.agent.one_node import task
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.diagnose.reread import ranks_to_read, reread
from ultrabench.agent.ranks.cleanup import LOG_TAIL_BYTES, copy_logs, join_tails, whole_logs
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.agent.ranks.sources import ObservationSource, StepSource, report_sources
from ultrabench.layout import Layout
from ultrabench.log_lines import LogLines
from ultrabench.log_steps import StepReader, StepSize
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey, ProcessWords, Workload, fill_in

MEASURE = measure(warmup_steps=2, min_steps=6, max_steps=8, loss_step=5)
SIZE = StepSize(tokens=1000, samples=10, gpus=2)


def task_of(**kernel):
    """A task of a program that only logs."""
    plain = replace(task("x.py", "cpu"), measure=MEASURE)
    return replace(plain, spec=replace(plain.spec, kernel=replace(plain.spec.kernel, **kernel)))


def followed(tmp_path, step_line, writes, loss_line=None):
    """The result of a program that made these `writes`, each of them seen by one look, and its lines of reports."""
    path = tmp_path / "log"
    path.write_text("")
    sources = [StepSource(0, 0, LogLines(path), StepReader(re.compile(step_line)), SIZE)]
    if loss_line:
        sources.append(ObservationSource(0, 0, LogLines(path), "loss_line", re.compile(loss_line)))
    progress, report_lines = AttemptProgress(2, ("n0",)), []
    for number, text in enumerate([*writes, ""], start=1):
        with path.open("a") as file:
            file.write(text)
        for source in sources:
            lines = source.read(is_last=number > len(writes))
            report_lines += lines
            progress.add([{"rank": 0, "line": line} for line in lines])
    progress.add([{"rank": rank, "code": 0, "tail": path.read_text()} for rank in (0, 1)])
    return classify(progress, task_of(step_line=step_line, loss_line=loss_line), None), report_lines


TIME_LINE = r"step \d+ took (?P<seconds>\S+) s"
STEP_LINE = r"step \d+ took (?P<seconds>\S+) s(?:, loss (?P<loss>\S+))?"


def test_the_last_line_counts_without_an_end(tmp_path):
    result, _ = followed(
        tmp_path, STEP_LINE, [f"step {n} took 0.{n} s\n" for n in range(1, 9)] + ["step 9 took 0.9 s"]
    )
    assert (result.status, result.measured_by) == (Status.OK, "log")
    assert result.step_times_s == (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def test_a_bar_gives_its_steps_their_losses_when_it_is_drawn_again(tmp_path):
    bar = r"(?P<seconds>[\d.]+)s/it(?:, loss=(?P<loss>\S+)\])?"
    states = [f"\r{n}/9 [00:01<00:01, 0.5s/it" for n in range(1, 10)]
    writes = [text for n, state in enumerate(states) for text in (f"{state}]", f"{state}, loss={9 - n}]")]
    result, report_lines = followed(tmp_path, bar, writes)
    assert (result.status, len(result.step_times_s), result.loss_final) == (Status.OK, 7, 5.0)
    assert sum("late_loss" in line for line in report_lines) == 9
    result, report_lines = followed(tmp_path, bar, ["".join(writes)])
    assert (result.status, len(result.step_times_s), result.loss_final) == (Status.OK, 7, 5.0)
    assert sum("late_loss" in line for line in report_lines) == 1  # the last state ends with the program


@pytest.mark.parametrize("loss", ["nan", "N/A", "inf", "-", "nan.0"])
def test_one_loss_that_is_no_number_makes_the_run_invalid(tmp_path, loss):
    texts = [f"step {n} took 0.5 s, loss {loss if n == 4 else n}\n" for n in range(1, 10)]
    result, _ = followed(tmp_path, STEP_LINE, texts)
    assert (result.status, result.cause) == (Status.INVALID, "non_finite_loss")
    assert re.fullmatch(r"loss is (nan|inf) at step 4", result.reason)


def test_a_loss_of_other_lines_is_compared_at_its_step(tmp_path):
    texts = [
        f"step {n} took 0.5 s\n" + (f"loss at {n}: {10 / n}\n" if n % 3 == 0 else "") for n in range(1, 10)
    ]
    result, _ = followed(tmp_path, TIME_LINE, texts, r"loss at (?P<step>\d+): (?P<loss>\S+)")
    assert (result.status, result.loss_final) == (Status.OK, 10 / 6)
    result, _ = followed(tmp_path, TIME_LINE, texts, r"loss at \d+: (?P<loss>\S+)")
    assert (result.status, result.loss_final) == (Status.OK, None)  # it has three lines, and step 5 is wanted
    bars = [f"\r{n}/9 [00:01, 0.5s/it, loss={10 / n}]" for n in range(1, 10) for _ in range(2)]
    result, _ = followed(tmp_path, r"(?P<seconds>[\d.]+)s/it", bars, r"loss=(?P<loss>[\d.]+)")
    assert (result.status, result.loss_final) == (Status.OK, 10 / 5)
    texts[5] = texts[5].replace(": 1.6", ": x1.6")
    result, _ = followed(tmp_path, TIME_LINE, texts, r"loss at (?P<step>\d+): (?P<loss>\S+)")
    assert (result.status, result.reason) == (Status.INVALID, "loss is nan at step 6")


def test_the_unit_of_another_quantity_makes_the_run_unmeasured(tmp_path):
    result, _ = followed(
        tmp_path, r"(?P<seconds>[\d.]+)it/s", [f"{n}/9 [00:01, 2.5it/s]\n" for n in range(1, 10)]
    )
    assert (result.status, result.cause, result.step_times_s) == (Status.INVALID, "unmeasured", ())
    assert "a pattern misreads the log: kernel.step_line: the unit of '2.5' is step/s" in result.reason
    assert "to test it: ultrabench kernel try-log" in result.reason


def test_a_time_that_is_none_makes_the_run_invalid(tmp_path):
    result, _ = followed(tmp_path, STEP_LINE, [f"step {n} took {n - 3} s\n" for n in range(1, 10)])
    assert (result.status, result.cause) == (Status.INVALID, "bad_report")
    assert "a line of kernel.step_line of which -2 s is not the time of a step" in result.reason


@pytest.mark.parametrize(
    ("step_line", "text", "seconds"),
    [
        (r"(?P<samples_per_s>\S+) samples/s", "step {n}: 40 samples/s", 0.25),
        (r"(?P<tokens_per_s>\S+) tok", "step {n}: 500 tok/s", 2.0),
        (r"(?P<tokens_per_s_per_gpu>\S+) tok", "step {n}: 500 tok/s", 1.0),
        (r"(?P<steps_per_s>\S+) it", "step {n}: 4.0 it/s", 0.25),
    ],
)  # fmt: skip
def test_rates_of_all_gpus_give_times(tmp_path, step_line, text, seconds):
    result, _ = followed(tmp_path, step_line, [text.format(n=n) + "\n" for n in range(1, 10)])
    assert (result.status, result.step_times_s) == (Status.OK, (seconds,) * 7)


def test_warm_up_counts_steps_and_not_lines(tmp_path):
    texts = [f"step {n} rate 2.0 it/s\n" for n in range(2, 19, 2)]
    result, _ = followed(tmp_path, r"step (?P<step>\d+) rate (?P<steps_per_s>\S+)", texts)
    assert (result.status, len(result.step_times_s)) == (Status.OK, 8)


def test_many_lines_without_a_time_make_the_run_suspect(tmp_path):
    texts = [f"step {n} took {'?' if n % 2 else 0.5} s\n" for n in range(1, 19)]
    result, _ = followed(tmp_path, STEP_LINE, texts)
    assert result.status == Status.OK
    assert result.log_doubts["unread_lines"] == "9 of 18 lines of steps have no time that can be read"


def test_lines_that_arrive_at_once_measure_nothing_and_say_what_to_do(tmp_path):
    result, _ = followed(tmp_path, r"step \d+", ["".join(f"step {n}\n" for n in range(9))])
    assert (result.status, result.cause) == (Status.INVALID, "unmeasured")
    assert (
        "9 lines of kernel.step_line arrived at once, so that they time nothing; make the program flush"
        in result.reason
    )


def with_logs(*texts, ranks_per_log=1, **kernel):
    """The result of ranks that exit with 0 and have these logs, one for each host if ranks share them."""
    num_ranks = len(texts) * ranks_per_log
    hosts = [f"n{n}" for n in range(len(texts))] if ranks_per_log > 1 else ["n0"]
    progress = AttemptProgress(num_ranks, hosts, starts_ranks=ranks_per_log > 1)
    spec = replace(
        task_of().spec,
        layout=Layout(dp=num_ranks),
        workload=Workload(seq_len=64, gbs=num_ranks),
        nodes=len(hosts),
        gpus_per_node=num_ranks // len(hosts),
    )
    options = {"launch_per": "node"} if ranks_per_log > 1 else {}
    kernel_task = replace(
        task_of(), spec=replace(spec, kernel=replace(spec.kernel, step_line=STEP_LINE, **kernel, **options))
    )
    with TemporaryDirectory() as folder:
        for number, text in enumerate(texts):
            (Path(folder) / f"rank{number * ranks_per_log}.log").write_text(text)
        node_ranks = (range(n, n + spec.gpus_per_node) for n in range(0, num_ranks, spec.gpus_per_node))
        for source in (s for ranks in node_ranks for s in report_sources(kernel_task, ranks, Path(folder))):
            lines = source.read(is_last=True)
            progress.add([{"rank": source.described_rank, "line": line} for line in lines])
    for number, text in enumerate(texts):
        progress.add([{"rank": number * ranks_per_log, "code": 0, "tail": text}])
    assert not progress.running_ranks
    return classify(progress, kernel_task, None)


def steps(seconds, loss="1", number=9):
    return "".join(f"step {n} took {seconds} s, loss {loss}\n" for n in range(number))


@pytest.mark.parametrize(
    ("logs", "seconds"),
    [
        (["", steps(0.3), ""], 0.3),
        ([steps(0.1), steps(0.2)], 0.1),
        (["step 1 took 0.1 s\n", steps(0.2)], 0.2),  # a step before the ranks divide their work
        ([steps(0.1, number=8), steps(0.2)], 0.1),  # the last line of rank 0 has not arrived
        ([steps(0.1, loss="nan"), steps(0.2)], 0.2),  # only the last pipeline stage knows the loss
    ],
)
def test_the_steps_count_of_the_lowest_rank_whose_log_has_them_all(logs, seconds):
    result = with_logs(*logs)
    assert (result.status, {*result.step_times_s}) == (Status.OK, {seconds})


def test_a_wrong_step_rank_names_the_rank_whose_log_has_the_steps():
    result = with_logs("step 1 of 9\n", "", steps(0.3), step_rank=0)
    assert (result.status, result.cause) == (Status.INVALID, "unmeasured")
    problem = "kernel.step_line matches no line in the log of rank 0 (kernel.step_rank=0)"
    assert (
        f"{problem}, but 9 lines in the end of the log of rank 2: use kernel.step_rank=any" in result.reason
    )
    result = with_logs("", "took 7\n")
    assert (
        "matches no line in the log of any rank; nearest in that of rank 1: took 7; to test" in result.reason
    )
    result = with_logs("", steps(0.3), ranks_per_log=2, step_rank=1)
    assert (
        "matches no line in the log of n0 (kernel.step_rank=1), but 9 lines in the end of the log of n1"
        in result.reason
    )


def test_the_log_of_a_node_counts_for_its_first_rank():
    result = with_logs("", steps(0.2), ranks_per_log=2, memory_line=r"loss (?P<reserved_mib>\d+)")
    assert (result.status, {*result.step_times_s}) == (Status.OK, {0.2})
    assert result.peak_mem_reserved_bytes == 2**20


def test_a_command_learns_where_it_starts():
    key, process = AttemptKey("x", 0, 0), ProcessWords(1, 2, "gpu01", 4711)
    words = ("x", "{node_rank}.{local_rank}", "{master_addr}:{master_port}")
    assert fill_in(task_of(command=words).spec, key, MEASURE, process) == ["x", "1.2", "gpu01:4711"]
    node = {"launch_per": "node"}
    assert fill_in(task_of(command=words[:1], **node).spec, key, MEASURE) == ["x"]
    with refused(
        "kernel.command has {local_rank} with kernel.launch_per=node; the command starts once on each node"
    ):
        fill_in(task_of(command=words, **node).spec, key, MEASURE)
    with refused("unknown word in kernel.command of kernel=code '{node_rnk}'; did you mean node_rank?"):
        fill_in(task_of(command=("x", "{node_rnk}")).spec, key, MEASURE)


def test_a_program_that_arrival_times_is_asked_for_one_step_more():
    key = AttemptKey("x", 0, 0)
    command = ("x", "{steps}")
    assert fill_in(task_of(command=command, step_line=STEP_LINE).spec, key, MEASURE) == ["x", "10"]
    assert fill_in(task_of(command=command, step_line=r"step \d+").spec, key, MEASURE) == ["x", "11"]


def test_the_error_of_arrival_widens_the_interval():
    times_s = tuple(0.5 + n / 1000 for n in range(8))
    result = classify(AttemptProgress(1, ("n0",)), task_of(), None)
    plain, wide = (replace(result, step_times_s=times_s, arrival_error_s=error_s) for error_s in (0.0, 0.05))
    assert wide.step_time_ci95_rel - plain.step_time_ci95_rel == pytest.approx(0.05 / 0.5035)
    assert math.isclose(plain.step_time_ci95_rel, 0.007 / 2 / 0.5035)


LOG = "".join(f"step {n} took {n / 10} s, mean {n} ms, loss {9 - n}, memory {n} GB\n" for n in range(1, 10))


def test_a_kept_log_gives_the_result_of_other_patterns():
    old = RunResult(status=Status.OK, measured_by="log", step_times_s=(9.0,), loss_final=7.0, duration_s=3.0,
                    peak_mem_reserved_bytes=5, stopped="interval")  # fmt: skip
    new = task_of(
        step_line=r"mean (?P<milliseconds>\S+) ms, loss (?P<loss>\S+),",
        memory_line=r"memory (?P<reserved_gb>\S+) GB",
    )
    result = reread(new, old, {0: LOG}, {"step_line"})
    assert (result.status, result.step_times_s[0], result.loss_final) == (Status.OK, 0.003, 4.0)
    assert (result.duration_s, result.stopped, result.peak_mem_reserved_bytes) == (3.0, "interval", 5)
    assert reread(new, old, {0: LOG}, {"step_line", "memory_line"}).peak_mem_reserved_bytes == 9e9
    unread = reread(task_of(step_line=r"lasted (?P<seconds>\S+)"), old, {0: LOG}, {"step_line"})
    assert (unread.status, unread.cause, unread.step_times_s) == (Status.INVALID, "unmeasured", ())
    again = reread(new, unread, {0: LOG}, {"step_line"})
    assert (again.status, again.cause, again.reason, again.stopped) == (Status.OK, None, None, "program")
    assert ranks_to_read(new, {"step_line"}) == ranks_to_read(new, {"memory_line"}) == {0}


def test_only_whole_logs_are_read_again(tmp_path):
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    texts = ["one\nwithout an end", "", "x" * LOG_TAIL_BYTES, "last\n"]
    for rank, text in enumerate(texts):
        (run / f"rank{rank}.log").write_text(text)
    join_tails(run, kept, range(4))
    assert whole_logs(kept) == {0: texts[0] + "\n", 1: "", 3: "last\n"}
    copy_logs(run, kept, 100)
    assert whole_logs(kept) == {0: texts[0], 1: "", 3: "last\n"}
    (run / "rank0.log").write_text("--- rank 7\n")
    join_tails(run, tmp_path / "other", range(4))
    assert whole_logs(tmp_path / "other") == whole_logs(tmp_path / "none") == {}
