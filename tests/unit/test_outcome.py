import json
import math

import pytest

from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.diagnose.root_cause import last_line
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.agent.ranks.watch import RunEnd
from ultrabench.measure import Measure
from ultrabench.rank_report import parse_line
from ultrabench.result import Status

MEASURE = Measure(warmup_steps=2, min_steps=6, max_steps=8, loss_step=5, target_ci95_rel=0.05)
STEPS = [
    {"event": "step", "seconds": 0.1 + 0.001 * n, "loss": 5.0 - n / 10, "measured": n >= 2} for n in range(8)
]
HANG = RunEnd(status=Status.HANG, reason="no progress for 31.0 s")
TIMEOUT = RunEnd(status=Status.TIMEOUT, reason="still in phase measure")


TRACE = 'Traceback (most recent call last):\n  File "t.py", line 1, in step\n    y = x @ x\n'


def ok(**change):
    return RankProgress(**{"steps": STEPS, "code": 0, **change})


def failing(kind, message, **change):
    error = {"event": "error", "kind": kind, "message": message}
    return RankProgress(**{"error": error, "code": 1, **change})


def killed(**change):
    return RankProgress(**{"code": -9, "killed_by_us": True, "steps": STEPS[:3], **change})


PEER = failing("comm", "RuntimeError: Connection closed by peer")


def judged(*ranks, stopped=None, ended=None, lost=None, hosts=()):
    end = RunEnd(status=Status.CANCELLED, reason=ended) if ended else stopped
    progress = AttemptProgress(len(ranks))
    progress.ranks = list(ranks)
    return classify(progress, MEASURE, end, lost=lost, hosts=hosts)


def steps_with(n, **change):
    return [{**s, **change} if i == n else s for i, s in enumerate(STEPS)]


@pytest.mark.parametrize(
    ("ranks", "status", "reason"),
    [
        ([ok(), ok()], "ok", None),
        ([ok(tail="OutOfMemoryError was caught and survived"), ok()], "ok", None),
        ([ok(), ok(steps=[])], "ok", None),
        # Out of memory: said by a rank, or read from the end of its log.
        ([failing("oom", "OutOfMemoryError: 2 GiB"), ok()], "oom", "rank 0: OutOfMemoryError"),
        ([ok(), RankProgress(code=1, tail="x\nCUDA out of memory. Tried\n")], "oom", "rank 1: CUDA"),
        (
            [ok(), RankProgress(code=1, tail="WARNING: CUDA out of memory\nstep 7\nno such folder\n")],
            "crash",
            "exited with code 1: no such folder",
        ),
        (
            [ok(), RankProgress(code=1, tail="CUDA out of memory\n" + "step\n" * 9 + "x\n")],
            "crash",
            "exited with code 1: x",
        ),
        (
            [ok(), RankProgress(code=1, tail="CUDA out of memory\nWARNING: not freed\n")],
            "oom",
            "rank 1: CUDA",
        ),
        (
            [ok(), RankProgress(code=1, tail="WARNING: CUDA out of memory\n")],
            "crash",
            "rank 1: exited with code 1",
        ),
        (
            [
                ok(),
                RankProgress(code=1, tail=f"{TRACE}torch.OutOfMemoryError: 2 GiB\n" + "bye: synced\n" * 20),
            ],
            "oom",
            "rank 1: torch.OutOfMemoryError",
        ),
        ([RankProgress(code=1, tail="  File\nMemoryError\n"), ok()], "oom", "rank 0: MemoryError"),
        ([ok(), RankProgress(code=-6, tail="std::bad_alloc")], "oom", "rank 1: std::bad_alloc"),
        (
            [RankProgress(code=1, tail="RuntimeError: DefaultCPUAllocator: can't allocate memory"), ok()],
            "oom",
            "DefaultCPUAllocator",
        ),
        # Causes come before the connection errors of their peers, wherever they stand.
        ([PEER, failing("oom", "OutOfMemoryError: 2 GiB"), PEER], "oom", "rank 1: OutOf"),
        ([PEER, RankProgress(code=1, tail="MemoryError"), PEER], "oom", "rank 1: MemoryError"),
        ([PEER, failing("non_finite", "loss is nan")], "invalid", "rank 1: loss is nan"),
        ([PEER, failing("replicas", "copies differ")], "invalid", "rank 1: copies differ"),
        ([PEER, failing("exception", "ValueError: no")], "crash", "rank 1: ValueError: no"),
        ([PEER, RankProgress(code=-11)], "crash", "segmentation fault, rank 1: killed by SIGSEGV"),
        (
            [PEER, RankProgress(code=-9)],
            "crash",
            "killed from outside, rank 1: killed by SIGKILL, which ultrabench did",
        ),
        ([PEER, RankProgress(code=3, tail="a\nbye\n")], "crash", "rank 1: exited with code 3: bye"),
        ([killed(), RankProgress(code=7)], "crash", "rank 1: exited with code 7: (empty log)"),
        # Nothing else explains it.
        ([PEER, PEER], "comm_error", "rank 0: RuntimeError: Connection closed"),
        ([killed(), PEER], "comm_error", "rank 1: RuntimeError: Connection closed"),
        ([RankProgress(code=1, tail="Connection reset by peer"), killed()], "comm_error", "rank 0: Conn"),
        ([RankProgress(code=1, tail="x\nNCCL error: unhandled\n")], "comm_error", "NCCL error"),
        # Numbers that are none.
        ([ok(steps=steps_with(4, loss=math.nan)), ok()], "invalid", "loss is nan at step 5"),
        ([ok(steps=steps_with(0, loss=math.inf)), ok()], "invalid", "loss is inf at step 1"),
        ([ok(steps=steps_with(2, loss=math.nan, step=7)), PEER], "invalid", "loss is nan at step 7"),
        ([failing("non_finite", "loss is nan at step 3"), PEER], "invalid", "rank 0: loss is nan"),
        # Ended well without saying anything.
        ([ok(steps=[]), ok()], "invalid", "reported 0 steps, of which 0 count"),
        ([ok(steps=STEPS[:2]), ok()], "invalid", "reported 2 steps, of which 0 count"),
        ([ok(steps=steps_with(3, seconds=0.0))], "invalid", "step 4 was reported with 0.0 sec"),
        ([ok(steps=steps_with(3, seconds=-1.0))], "invalid", "step 4 was reported with -1.0 sec"),
        ([RankProgress(), RankProgress()], "crash", "vanished without an exit code"),
    ],
)
def test_how_it_ended(ranks, status, reason):
    result = judged(*ranks)
    assert result.status == status
    assert (result.reason is None) if reason is None else reason in result.reason
    assert result.reason is None or "\n" not in result.reason


@pytest.mark.parametrize(
    ("ranks", "words", "status", "reason"),
    [
        ([killed(), killed()], {"stopped": HANG}, "hang", HANG.reason),
        ([killed(), killed()], {"stopped": TIMEOUT}, "timeout", TIMEOUT.reason),
        ([killed(), killed()], {"ended": "cancelled by the user"}, "cancelled", "cancelled by the"),
        # A cause found among the ranks is believed before the deadline it led to.
        ([killed(), failing("oom", "MemoryError")], {"stopped": HANG}, "oom", "rank 1: MemoryError"),
        ([killed(), failing("non_finite", "inf")], {"ended": "x"}, "invalid", "rank 1: inf"),
        ([killed(steps=steps_with(1, loss=math.nan))], {"stopped": HANG}, "invalid", "loss is nan"),
        # The log of a rank that we killed proves nothing.
        ([killed(tail="MemoryError in a thread, handled")], {"stopped": HANG}, "hang", HANG.reason),
    ],
)
def test_what_we_decided_ourselves(ranks, words, status, reason):
    result = judged(*ranks, **words)
    assert result.status == status
    assert reason in result.reason


def test_the_facts_of_an_ok_run():
    done = {"event": "done", "stopped": "interval", "hardware_flops_per_step": 4e9}
    progress = AttemptProgress(2)
    progress.ranks = [
        ok(done=done, memory={"allocated_bytes": 10, "reserved_bytes": 30}),
        ok(memory={"allocated_bytes": 20, "reserved_bytes": 25}),
    ]
    progress.environment = {"gpu_name": "cpu", "torch_version": "2.13.0", "omp_num_threads": 1}
    progress.first_step = progress.started + 1.5
    result = classify(progress, MEASURE, None)
    assert result.status == Status.OK
    assert result.step_times_s == pytest.approx([0.102, 0.103, 0.104, 0.105, 0.106, 0.107])
    assert result.loss_final == pytest.approx(4.6)
    assert result.stopped == "interval"
    assert result.ci_reached is True
    assert result.measured_by == "report"
    assert result.hardware_flops_per_step == 4e9
    assert (result.peak_mem_allocated_bytes, result.peak_mem_reserved_bytes) == (20, 30)
    assert result.peak_mem_reserved_rank0_bytes == 30
    assert result.init_time_s == pytest.approx(1.5)
    assert (result.gpu_name, result.torch_version, result.omp_num_threads) == ("cpu", "2.13.0", 1)
    assert result.evidence == {}


def test_what_is_not_known_is_none():
    result = judged(ok(steps=[{"event": "step", "seconds": 0.1}] * 4))
    assert result.status == Status.OK
    assert result.step_times_s == (0.1, 0.1)
    assert result.stopped == "program"
    unknown = ("loss_final", "ci_reached", "peak_mem_allocated_bytes", "peak_mem_reserved_bytes",
               "peak_mem_reserved_rank0_bytes", "hardware_flops_per_step", "gpu_name")  # fmt: skip
    assert {name: getattr(result, name) for name in unknown} == dict.fromkeys(unknown)


def test_an_interval_too_wide_is_still_ok():
    wide = [{**s, "seconds": s["seconds"] * (1 + n % 2)} for n, s in enumerate(STEPS)]
    result = judged(ok(steps=wide))
    assert (result.status, result.ci_reached) == (Status.OK, False)


def test_failures_leave_evidence_of_every_rank():
    result = judged(PEER, RankProgress(code=3, phase="measure", microbatches=7, tail="a\nbye\n"))
    first, second = result.evidence["ranks"]
    assert first["error"] == "RuntimeError: Connection closed by peer"
    assert (second["rank"], second["code"], second["phase"]) == (1, 3, "measure")
    assert (second["microbatches"], second["last_line"]) == (7, "bye")


def test_marked_steps_are_believed_else_the_warm_up_is_dropped():
    unmarked = [{"seconds": float(n)} for n in range(5)]
    assert RankProgress(steps=unmarked).measured_steps(MEASURE) == [2.0, 3.0, 4.0]
    marked = [{"seconds": float(n), "measured": n in (0, 4)} for n in range(5)]
    assert RankProgress(steps=marked).measured_steps(MEASURE) == [0.0, 4.0]


@pytest.mark.parametrize(
    ("text", "line"), [("a\nb\n\n  \n", "b"), ("", "(empty log)"), ("x" * 999, "x" * 300)]
)
def test_last_line(text, line):
    assert last_line(text) == line


# What a user's program reports may be anything; the agent has to survive it.
def said(line):
    return parse_line(json.dumps(line))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, "fast", None, []])
def test_step_times_that_are_no_numbers_are_invalid(seconds):
    steps = [said({"event": "step", **s}) for s in steps_with(4, seconds=seconds)]
    found = judged(ok(steps=steps))
    assert (found.status, found.reason) == (Status.INVALID, "step 5 was reported with no seconds")


def test_a_measured_step_without_seconds_is_invalid():
    steps = [{k: v for k, v in s.items() if k != "seconds"} for s in STEPS]
    assert judged(ok(steps=steps)).status == Status.INVALID


def test_an_unnamed_signal_is_a_crash():
    assert judged(RankProgress(code=-40)).status == Status.CRASH


@pytest.mark.parametrize(
    "line",
    [
        {"event": "store"},
        {"event": "store", "port": "first"},
        {"event": "memory", "reserved_bytes": "much"},
        {"event": "environment", "gpu_name": 7},
        {"event": "done", "hardware_flops_per_step": math.nan},
    ],
)
def test_report_lines_with_nonsense_do_not_stop_the_agent(line):
    progress = AttemptProgress(2)
    for rank in (0, 1):
        progress.add([{"rank": rank, "line": s} for s in STEPS])
        progress.add([{"rank": rank, "line": {"event": "memory", "reserved_bytes": 5}}])
    progress.add([{"rank": 1, "line": said(line)}])
    progress.add([{"rank": rank, "code": 0} for rank in (0, 1)])
    assert classify(progress, MEASURE, None).status == Status.OK


def test_gathering_follows_the_ranks():
    progress = AttemptProgress(2)
    assert (progress.running, progress.failed, progress.spoke) == ([0, 1], False, False)
    progress.add([{"rank": 0, "line": {"event": "phase", "name": "init"}}])
    progress.add([{"rank": 0, "line": {"event": "store", "port": 1234}}])
    progress.add([{"rank": 1, "microbatches": 3, "step": 0, "part": ""}])
    assert (progress.phase, progress.port, progress.spoke) == ("init", 1234, True)
    assert progress.ranks[1].microbatches == 3
    assert progress.first_step is None
    progress.add([{"rank": 0, "line": STEPS[0]}])
    assert progress.first_step is not None
    progress.add([{"rank": 0, "code": 0, "tail": "bye"}])
    assert (progress.running, progress.failed) == ([1], False)
    progress.add([{"rank": 1, "line": {"event": "error", "kind": "oom", "message": "first"}}])
    progress.add([{"rank": 1, "line": {"event": "error", "kind": "comm", "message": "later"}}])
    assert progress.failed
    assert progress.ranks[1].error["message"] == "first"


def test_a_result_of_another_accelerator_is_invalid():
    progress = AttemptProgress(1)
    progress.ranks = [ok()]
    progress.environment = {"gpu_name": "NVIDIA A10"}
    for names, status in [((), "ok"), (("NVIDIA A10",), "ok"), (("NVIDIA H200",), "invalid")]:
        found = classify(progress, MEASURE, None, gpu_names=names)
        assert found.status == status
    assert found.reason == "it ran on 'NVIDIA A10'; this hardware has NVIDIA H200"


def test_what_happens_after_every_rank_is_done_is_no_news():
    done = {"event": "done"}
    late = failing("comm", "E: closed", done=done, steps=STEPS)
    ranks = [ok(done=done), ok(done=done, code=-9), late]
    assert judged(*ranks, stopped=HANG).status == Status.OK
    assert judged(ok(done=done), ok(code=-11)).status == Status.CRASH
