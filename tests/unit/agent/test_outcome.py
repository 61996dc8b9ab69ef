"""How an attempt ended, by what its ranks reported, how they exited and what the agent decided."""

import json
import math
from dataclasses import replace

import pytest

from tests.configs import measure
from tests.unit.agent.one_node import task
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.ranks.node import oom_kills
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.rank_report import parse_line
from ultrabench.result import RunResult, Status

HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
MEASURE = measure(warmup_steps=2, min_steps=6, max_steps=8, loss_step=5, target_ci95_rel=0.05)
TASK = replace(task("x.py", "cpu"), measure=MEASURE)
STEPS = [
    {"event": "step", "seconds": 0.1 + 0.001 * n, "loss": 5.0 - n / 10, "measured": n >= 2} for n in range(8)
]
HANG = RunResult(
    status=Status.HANG, reason="no progress for 31.0 s", cause="hang", evidence={"hang_cause": "x"}
)
TIMEOUT = RunResult(status=Status.TIMEOUT, reason="still in phase measure", cause="time_limit")
CANCELLED = RunResult(status=Status.CANCELLED, reason="by SIGTERM", cause="stopped")
TRACE = 'Traceback (most recent call last):\n  File "t.py", line 1, in step\n    y = x @ x\n'
KEY_ERROR = f"{TRACE}KeyError: 'lr'\n"


def ok(**change):
    return RankProgress(**{"steps": STEPS, "code": 0, **change})


def logged(tail, code=1, **change):
    return RankProgress(code=code, tail=tail, **change)


def failing(kind, message, **change):
    return RankProgress(
        **{"error": {"event": "error", "kind": kind, "message": message}, "code": 1, **change}
    )


def killed(**change):
    return RankProgress(**{"code": -9, "killed_by_us": True, "steps": STEPS[:3], **change})


def steps_with(n, **change):
    return [{**s, **change} if i == n else s for i, s in enumerate(STEPS)]


def progress_of(ranks, hosts=HOSTS):
    """The progress of an attempt with these ranks, which may be the same object several times."""
    progress = AttemptProgress(len(ranks), hosts)
    places = [(empty.number, empty.host) for empty in progress.ranks]
    progress.ranks = [replace(r, number=n, host=host) for r, (n, host) in zip(ranks, places, strict=True)]
    return progress


def judged(*ranks, end=None, lost=None):
    return classify(progress_of(ranks), TASK, end, lost=lost)


PEER = failing("comm", "RuntimeError: Connection closed by peer")
DONE = ok(done={"event": "done"})
GONE = "the agent of node 2 (gpu03) is gone"


@pytest.mark.parametrize(
    ("ranks", "status", "reason"),
    [
        ([ok(), ok()], "ok", None),
        ([ok(tail="OutOfMemoryError was caught and survived"), ok()], "ok", None),
        ([ok(), ok(steps=[])], "ok", None),
        # A lack of memory is reported by a rank, or is read from the end of its log.
        ([failing("oom", "OutOfMemoryError: 2 GiB"), ok()], "oom", "rank 0 on gpu01: OutOfMemoryError"),
        ([ok(), logged("x\nCUDA out of memory. Tried\n")], "oom", "rank 1 on gpu03: CUDA"),
        ([ok(), logged("WARNING: CUDA out of memory\nstep 7\nno such folder\n")], "crash",
         "exited with code 1: no such folder"),
        ([ok(), logged("CUDA out of memory\n" + "step\n" * 9 + "x\n")], "crash", "exited with code 1: x"),
        ([ok(), logged("CUDA out of memory\nWARNING: not freed\n")], "oom", "gpu03: CUDA"),
        ([ok(), logged("WARNING: CUDA out of memory\n")], "crash", "gpu03: exited with code 1"),
        ([ok(), logged(f"{TRACE}torch.OutOfMemoryError: 2 GiB\n" + "bye: synced\n" * 20)], "oom",
         "gpu03: torch.OutOfMemoryError"),
        # Causes come before the connection errors of their peers, wherever they stand.
        ([PEER, failing("oom", "OutOfMemoryError: 2 GiB"), PEER], "oom", "rank 1 on gpu02: OutOf"),
        ([PEER, logged("MemoryError"), PEER], "oom", "rank 1 on gpu02: MemoryError"),
        ([PEER, failing("non_finite", "loss is nan")], "invalid", "gpu03: loss is nan"),
        ([PEER, failing("replicas", "copies differ")], "invalid", "gpu03: copies differ"),
        ([PEER, failing("option", "tp=2 was asked for, 1 ran")], "invalid",
         "an option was ignored, rank 1 on gpu03: tp=2 was asked for, 1 ran"),
        ([PEER, failing("exception", "ValueError: no")], "crash", "gpu03: ValueError: no"),
        ([PEER, logged("", code=-9)], "crash",
         "killed from outside, rank 1 on gpu03: killed by SIGKILL, which ultrabench did not send: (empty log)"),
        ([killed(), logged("", code=7)], "crash", "gpu03: exited with code 7: (empty log)"),
        ([logged("", code=-40)], "crash", "killed by a signal, rank 0 on gpu01: killed by signal 40"),
        ([logged("a\nbye\n\n  \n", code=3)], "crash", "exited with code 3: bye"),
        ([logged("x" * 999, code=3)], "crash", f"exited with code 3: {'x' * 300}"),
        # Only a communication error explains it.
        ([PEER, PEER], "comm_error", "rank 0 on gpu01: RuntimeError: Connection closed"),
        ([killed(), PEER], "comm_error", "gpu03: RuntimeError: Connection closed"),
        ([logged("Connection reset by peer"), killed()], "comm_error", "gpu01: Conn"),
        # A loss that is not finite, and a program that ended well without a measurement.
        ([ok(steps=steps_with(4, loss=math.nan)), ok()], "invalid", "loss is nan at step 5"),
        ([ok(steps=steps_with(0, loss=math.inf)), ok()], "invalid", "loss is inf at step 1"),
        ([ok(steps=steps_with(2, loss=math.nan, step=7)), PEER], "invalid", "loss is nan at step 7"),
        ([ok(steps=[]), ok()], "invalid", "reported 0 steps, of which 0 count"),
        ([ok(steps=STEPS[:2]), ok()], "invalid", "reported 2 steps, of which 0 count"),
        ([ok(steps=steps_with(3, seconds=0.0))], "invalid", "step 4 was reported with 0.0 sec"),
        ([ok(steps=[{k: v for k, v in STEPS[0].items() if k != "seconds"}])], "invalid", "with no seconds"),
        ([RankProgress(), RankProgress()], "crash", "vanished without an exit code"),
    ],
)  # fmt: skip
def test_how_it_ended(ranks, status, reason):
    result = judged(*ranks)
    assert result.status == status
    assert (result.reason is None) if reason is None else reason in result.reason
    assert result.reason is None or "\n" not in result.reason


@pytest.mark.parametrize(
    ("ranks", "words", "status", "cause", "suspects"),
    [
        # What the agent decided: a lost node, the end of the allocation, a missed deadline.
        ([PEER, PEER, killed(), PEER], {"lost": GONE}, "node_fail", "node_failure", ["gpu03"]),
        ([PEER, failing("oom", "MemoryError"), PEER, PEER], {"lost": GONE}, "oom", "cpu_oom", []),
        ([PEER, failing("exception", "E: x"), PEER, PEER], {"lost": GONE}, "node_fail", "node_failure", ["gpu03"]),
        ([PEER, logged("", code=-15), PEER, PEER], {"end": CANCELLED}, "cancelled", "stopped", []),
        ([killed(), killed()], {"end": HANG}, "hang", "hang", []),
        ([killed(), killed()], {"end": TIMEOUT}, "timeout", "time_limit", []),
        # A cause that a rank reported is believed before the deadline that it led to.
        ([killed(), failing("oom", "MemoryError")], {"end": HANG}, "oom", "cpu_oom", []),
        ([killed(), failing("non_finite", "inf")], {"end": CANCELLED}, "invalid", "non_finite_loss", []),
        ([killed(steps=steps_with(1, loss=math.nan))], {"end": HANG}, "invalid", "non_finite_loss", []),
        # The log of a rank that was killed proves nothing, but for an exception that nobody caught at its end.
        ([killed(tail="MemoryError in a thread, handled")], {"end": HANG}, "hang", "hang", []),
        ([killed(), killed(tail=KEY_ERROR)], {"end": HANG}, "crash", "exception", []),
        ([killed(), killed(tail=KEY_ERROR + "on\n" * 9)], {"end": HANG}, "hang", "hang", []),
        # Suspects of communication errors: whom peers name, who alone reports nothing, or who failed first.
        ([PEER, logged("", code=-7), PEER, PEER], {}, "crash", "bus_error", ["gpu02"]),
        ([logged("DistBackendError: NCCL error\nLast error:\ngpu01:17:42 [0] NCCL WARN closed by peer gpu04<44321>"),
          PEER, PEER, PEER], {}, "comm_error", "nccl_error", ["gpu04"]),
        ([PEER, PEER, killed(), PEER], {}, "comm_error", "connection_error", ["gpu03"]),
        ([failing("comm", "late", failed_at=9.0), failing("comm", "first", failed_at=3.0)], {},
         "comm_error", "connection_error", ["gpu03"]),
        # A rank that ended with 0 while others needed it; one that was done may end before the others fail.
        ([killed(), logged("", code=0), killed(), killed()], {"end": HANG}, "crash", "exited_early", []),
        ([PEER, logged("", code=0), PEER, PEER], {}, "crash", "exited_early", []),
        ([killed(), logged("", code=0), killed(), killed()], {"end": TIMEOUT}, "timeout", "time_limit", []),
        ([PEER, DONE, PEER, PEER], {}, "comm_error", "connection_error", ["gpu01"]),
        ([logged("", code=3), logged("", code=0), PEER, PEER], {}, "crash", "exit_code", []),
        ([*[logged("", code=0)] * 3, killed()], {"end": HANG}, "hang", "hang", []),
    ],
)  # fmt: skip
def test_causes_and_suspects(ranks, words, status, cause, suspects):
    found = judged(*ranks, **words)
    assert (found.status, found.cause, list(found.suspect_hosts)) == (status, cause, suspects), found.reason
    assert ("hang_cause" in found.evidence) == (words.get("end") is HANG)


@pytest.mark.parametrize(
    ("ranks", "end", "reason"),
    [
        ([killed(), logged("ImportError: no gloo\n"), killed()], None,
         "a module cannot be imported, rank 1 on gpu02: ImportError: no gloo"),
        ([killed(), logged("", code=-9), killed()], None,
         "killed from outside, rank 1 on gpu02: killed by SIGKILL, which ultrabench did not send: (empty log)"),
        ([PEER, DONE, failing("oom", "MemoryError", failed_at=9.0)], None, "out of memory, rank 2 on gpu03: MemoryError"),
        ([DONE, logged("", code=0, phase="join")], None,
         "ended before it was done, rank 1 on gpu03: exited with code 0 in phase join while others went on"),
        ([logged("", code=0), logged("", code=0)], None, "the ranks vanished without an exit code"),
        ([DONE, killed(phase="join")], TIMEOUT, TIMEOUT.reason),
        ([DONE, DONE], None, None),
    ],
)  # fmt: skip
def test_a_preflight_names_the_rank_that_failed_and_not_those_that_waited_for_it(ranks, end, reason):
    progress = progress_of(ranks)
    progress.probe, progress.environment = {"hbm_bytes_per_s": 1e12}, {"gpu_name": "A100"}
    result = classify(progress, replace(TASK, probe=True, gpu_names=("H100",)), end)
    assert (result.status == Status.OK, result.reason) == (reason is None, reason)


def test_the_facts_of_an_ok_run():
    done = {"event": "done", "stopped": "interval", "hardware_flops_per_step": 4e9}
    progress = progress_of([
        ok(done=done | {"graphs": 1}, memory={"allocated_bytes": 10, "reserved_bytes": 30},
           steps=steps_with(0, gradient_norm=2.5)),
        ok(done=done | {"graphs": 2}, memory={"allocated_bytes": 20, "reserved_bytes": 25}),
    ])  # fmt: skip
    progress.environment = {"gpu_name": "cpu", "torch_version": "2.13.0", "omp_num_threads": 1}
    options = {"attention": "cudnn", "tp": 2, "compile": False}
    progress.add([{"rank": 0, "line": parse_line(json.dumps({"event": "ran", "options": options}))}])
    progress.first_step = progress.started + 1.5
    result = classify(progress, TASK, None)
    expected = {
        "status": Status.OK, "stopped": "interval", "ci_reached": True, "measured_by": "report",
        "hardware_flops_per_step": 4e9, "graphs": 2, "attention": "cudnn",
        "ran": {"attention": "cudnn", "tp": "2", "compile": "False"}, "gradient_norm": 2.5,
        "peak_mem_allocated_bytes": 20, "peak_mem_reserved_bytes": 30, "peak_mem_reserved_rank0_bytes": 30,
        "gpu_name": "cpu", "torch_version": "2.13.0", "omp_num_threads": 1,
        "evidence": {}, "loss_final": pytest.approx(4.6), "init_time_s": pytest.approx(1.5),
        "step_times_s": pytest.approx([0.102, 0.103, 0.104, 0.105, 0.106, 0.107]),
    }  # fmt: skip
    assert {name: getattr(result, name) for name in expected} == expected
    assert classify(progress, replace(TASK, gpu_names=("H100",)), None).cause == "wrong_gpu"


def test_what_is_not_known_is_none_and_steps_that_are_not_marked_count_after_the_warm_up():
    result = judged(ok(steps=[{"event": "step", "seconds": 0.1}] * 4))
    assert (result.status, result.step_times_s, result.stopped) == (Status.OK, (0.1, 0.1), "program")
    unknown = ("loss_final", "ci_reached", "peak_mem_allocated_bytes", "peak_mem_reserved_bytes",
               "peak_mem_reserved_rank0_bytes", "hardware_flops_per_step", "graphs", "attention",
               "gpu_name")  # fmt: skip
    assert {name: getattr(result, name) for name in unknown} == dict.fromkeys(unknown)


def test_an_interval_too_wide_is_still_ok():
    wide = [{**s, "seconds": s["seconds"] * (1 + n % 2)} for n, s in enumerate(STEPS)]
    result = judged(ok(steps=wide))
    assert (result.status, result.ci_reached) == (Status.OK, False)


def test_failures_leave_evidence_of_every_rank():
    result = judged(PEER, logged("a\nbye\n", code=3, phase="measure", microbatches=7))
    first, second = result.evidence["ranks"]
    assert first["error"] == "RuntimeError: Connection closed by peer"
    names = ("rank", "code", "phase", "microbatches", "last_line")
    assert [second[name] for name in names] == [1, 3, "measure", 7, "bye"]


@pytest.mark.parametrize("seconds", [math.nan, "fast", None, []])
def test_reported_step_times_that_are_no_numbers_are_invalid(seconds):
    steps = [parse_line(json.dumps({"event": "step", **s})) for s in steps_with(4, seconds=seconds)]
    found = judged(ok(steps=steps))
    assert (found.status, found.reason) == (Status.INVALID, "step 5 was reported with no seconds")


GIB = 2**30
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.10 GiB of which {free} GiB is free. Including non-PyTorch memory, this process has {own} GiB memory in use."
)
PLAIN = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
FREE = {"free_bytes": 78 * GIB, "total_bytes": 79 * GIB}
SHARED = {"free_bytes": 60 * GIB, "total_bytes": 79 * GIB}
FULL = {"torch_bytes": 74 * GIB, "free_bytes": 0.2 * GIB, "total_bytes": 79 * GIB}
TAKEN = {"torch_bytes": 30 * GIB, "free_bytes": 0.2 * GIB, "total_bytes": 79 * GIB}


def lacking(message, memory=None, error=None):
    progress = AttemptProgress(2, ("gpu01", "gpu02"))
    said = {"event": "error", "kind": "oom", "message": message, **(error or {})}
    progress.ranks[1] = RankProgress(number=1, host="gpu02", code=1, error=said, memory=memory or {})
    found = classify(progress, task("x.py", "cpu"), None)
    return found.status, found.cause, found.confirmed, found.suspect_hosts


@pytest.mark.parametrize(
    ("message", "memory", "error", "expected"),
    [
        # All of it was free, or the allocator says that this process has all that is not.
        (NEW.format(free="1.03", own="78.06"), FREE, None, True),
        (NEW.format(free="1.03", own="78.06"), None, None, True),
        (PLAIN, FREE, FULL, True),
        # Somebody else was there before, or came later.
        (NEW.format(free="1.03", own="78.06"), SHARED, None, "foreign"),
        (NEW.format(free="1.03", own="38.06"), FREE, None, "foreign"),
        (NEW.format(free="1.03", own="38.06"), None, None, "foreign"),
        # Nothing tells, or too little.
        (PLAIN, None, None, False),
        (PLAIN, FREE, None, False),
        (PLAIN, FREE, TAKEN, False),
        (PLAIN, None, {**FULL, "total_bytes": 0}, False),
    ],
)
def test_a_gpu_that_is_full(message, memory, error, expected):
    if expected == "foreign":
        assert lacking(message, memory, error) == ("crash", "foreign_memory", None, ("gpu02",))
    else:
        assert lacking(message, memory, error) == ("oom", "cuda_oom", expected, ())


CPU = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1000 bytes."


@pytest.mark.parametrize(
    ("message", "memory", "error", "confirmed"),
    [
        (CPU, {"limit_bytes": 5000}, {"data_bytes": 4500}, True),
        (CPU, {"limit_bytes": 5000}, {"data_bytes": 3600}, True),
        ("MemoryError", {"limit_bytes": 5000}, {"data_bytes": 4500}, True),
        (CPU, {"limit_bytes": 5000}, {}, True),
        # There was room under the limit: something else had no memory.
        (CPU, {"limit_bytes": 9000}, {"data_bytes": 4500}, False),
        (CPU, {}, {"data_bytes": 4500}, False),
    ],
)
def test_a_cpu_rank_and_its_limit(message, memory, error, confirmed):
    assert lacking(message, memory, error) == ("oom", "cpu_oom", confirmed, ())


CGROUPS = [
    ("4:memory:/slurm/job_7\n0::/\n", "memory/slurm/job_7/memory.oom_control"),
    ("0::/system.slice/job_7\n", "system.slice/job_7/memory.events"),
    ("3:cpu,memory:/a\n", "memory/a/memory.oom_control"),
]


@pytest.mark.parametrize(("membership", "counter"), CGROUPS)
def test_kills_in_the_own_cgroup_count_and_else_those_of_the_host(tmp_path, membership, counter):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert oom_kills(proc, cgroups) == 0
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(membership)
    (proc / "vmstat").write_text("pgfault 3\noom_kill 7\n")
    assert oom_kills(proc, cgroups) == 7
    (cgroups / counter).parent.mkdir(parents=True)
    (cgroups / counter).write_text("oom_kill_disable 0\noom 9\noom_kill 2\n")
    assert oom_kills(proc, cgroups) == 2
    assert oom_kills() >= 0, "the counter of this host can be read"
