"""How an attempt ended, by what its ranks reported, how they exited and what the agent decided."""

import json
import math
from dataclasses import replace

import pytest

from tests.configs import measure
from tests.unit.agent.one_node import task
from ultrabench.agent.diagnose.findings import fingerprint
from ultrabench.agent.diagnose.outcome import Outage, classify
from ultrabench.agent.ranks.rank_progress import NO_EVIDENCE, AttemptProgress, RankProgress
from ultrabench.oom_kills import num_oom_kills
from ultrabench.rank_report import CHECKPOINT_NUMBERS, parse_line
from ultrabench.result import SLOWER, RunResult, Status

HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
MEASURE = measure(warmup_steps=2, min_steps=6, max_steps=8, loss_step=5, target_ci95_rel=0.05)
TASK = replace(task("x.py", "cpu"), measure=MEASURE)
STEPS = [
    {"event": "step", "seconds": 0.1 + 0.001 * n, "loss": 5.0 - n / 10, "measured": n >= 2} for n in range(8)
]
HANG = RunResult(status=Status.HANG, reason="no progress", cause="hang", evidence={"hang_cause": "x"})
TIMEOUT = RunResult(status=Status.TIMEOUT, reason="still in phase measure", cause="time_limit")
CANCELLED = RunResult(status=Status.CANCELLED, reason="by SIGTERM", cause="stopped")
TRACE = 'Traceback (most recent call last):\n  File "t.py", line 1, in step\n    y = x @ x\n'
KEY_ERROR = f"{TRACE}KeyError: 'lr'\n"


def ok(**change):
    return RankProgress(**{"steps": STEPS, "code": 0, **change})


def logged(tail, code=1, **change):
    return RankProgress(code=code, tail=tail, **change)


def failing(kind, message, **change):
    error = {"event": "error", "kind": kind, "message": message}
    return RankProgress(**{"error_line": error, "code": 1, **change})


def killed(**change):
    return RankProgress(**{"code": -9, "killed_by_us": True, "steps": STEPS[:3], **change})


def steps_with(n, **change):
    return [{**s, **change} if i == n else s for i, s in enumerate(STEPS)]


def progress_of(ranks):
    """The progress of an attempt with these ranks, which may be the same object several times."""
    progress = AttemptProgress(len(ranks), HOSTS)
    places = ({"number": rank.number, "host": rank.host} for rank in progress.ranks)
    progress.ranks = [replace(rank, **place) for rank, place in zip(ranks, places, strict=True)]
    return progress


def judged(*ranks, end=None, lost=None):
    return classify(progress_of(ranks), TASK, end, outage=lost)


PEER = failing("comm", "RuntimeError: Connection closed by peer")
DONE = ok(done_line={"event": "done"})
GONE = Outage("gpu03", "the agent of node 2 (gpu03) is gone", "agent_gone")


@pytest.mark.parametrize(
    ("ranks", "status", "reason"),
    [
        ([ok(), ok(steps=[])], "ok", None),
        # A lack of memory is read from the end of a log, unless the program went on after it.
        ([ok(), logged("WARNING: CUDA out of memory\nstep 7\nno such folder\n")], "crash",
         "exited with code 1: no such folder"),
        ([ok(), logged("CUDA out of memory\n" + "step\n" * 9 + "x\n")], "crash", "exited with code 1: x"),
        ([ok(), logged("CUDA out of memory\nWARNING: not freed\n")], "oom", "gpu03: CUDA"),
        ([ok(), logged("WARNING: CUDA out of memory\n")], "crash", "gpu03: exited with code 1"),
        ([ok(), logged(f"{TRACE}torch.OutOfMemoryError: 2 GiB\n" + "bye: synced\n" * 20)], "oom",
         "gpu03: torch.OutOfMemoryError"),
        # Causes come before the connection errors of their peers, wherever they stand.
        ([PEER, failing("oom", "OutOfMemoryError: 2 GiB"), PEER], "oom", "rank 1 on gpu02: OutOf"),
        ([PEER, failing("non_finite", "loss is nan")], "invalid", "gpu03: loss is nan"),
        ([PEER, failing("replicas", "copies differ")], "invalid", "gpu03: copies differ"),
        ([PEER, failing("option", "requested tp=2, but ran 1")], "invalid",
         "an option was ignored, rank 1 on gpu03: requested tp=2, but ran 1"),
        ([killed(), logged("", code=7)], "crash", "gpu03: exited with code 7: (empty log)"),
        ([logged("", code=-40)], "crash", "killed by a signal, rank 0 on gpu01: killed by signal 40"),
        ([logged("a\nbye\n\n  \n", code=3)], "crash", "exited with code 3: bye"),
        ([logged("x" * 999, code=3)], "crash", f"exited with code 3: {'x' * 300}"),
        # A loss that is not finite, and a program that ended well without a measurement.
        ([ok(steps=steps_with(0, loss=math.inf)), ok()], "invalid", "loss is inf at step 1"),
        ([ok(steps=steps_with(2, loss=math.nan, step=7)), PEER], "invalid", "loss is nan at step 7"),
        ([ok(steps=STEPS[:2]), ok()], "invalid", "reported only warm-up (2 steps)"),
        ([ok(steps=steps_with(3, seconds=0.0))], "invalid", "step 4 was reported with 0.0 sec"),
        ([ok(steps=[{"event": "step"}])], "invalid", "step 1 was reported with no seconds"),
        ([RankProgress(), RankProgress()], "crash", "ended without an exit code"),
    ],
)  # fmt: skip
def test_how_it_ended(ranks, status, reason):
    result = judged(*ranks)
    assert result.status == status
    assert (result.reason is None) if reason is None else reason in result.reason
    assert result.reason is None or "\n" not in result.reason


NUMBERS = dict(zip(CHECKPOINT_NUMBERS, (2.0, 1.0, 0.1, 3.0, 0.5, 96), strict=True))
SAVED = replace(DONE, checkpoint_line={"event": "checkpoint", **NUMBERS})
FULL = replace(DONE, checkpoint_line={"message": "OSError: [Errno 122] Disk quota exceeded"})
SLOW = RunResult(status=Status.OK, reason="saving did not end within 9 s", cause="disk_slow")

SLOWER_RUN = RunResult(status=Status.OK, reason="the fastest of 2 steps took 9 s", stopped=SLOWER)


@pytest.mark.parametrize(
    ("ranks", "words", "cause", "reason"),
    [
        ([SAVED, SAVED], {}, None, None),
        ([FULL, FULL], {}, "disk_full", "Disk quota exceeded"),
        ([replace(DONE, checkpoint_line={"message": "PermissionError: x"})], {}, "exception", "PermissionError: x"),
        ([replace(DONE, code=None), replace(DONE, code=-9, killed_by_us=True)], {"end": SLOW}, "disk_slow",
            "within 9 s"),
        ([DONE, replace(DONE, code=-9)], {}, "killed", "killed by SIGKILL, which ultrabench did not send"),
        ([replace(DONE, code=None)] * 3, {"lost": GONE}, "agent_gone", "gpu03"),
        ([replace(DONE, code=None)], {"end": CANCELLED}, "stopped", "by SIGTERM"),
        ([ok(code=-9, killed_by_us=True)], {"end": SLOWER_RUN}, "stopped", "measure.race=null never does this"),
    ],
)  # fmt: skip
def test_whatever_becomes_of_a_checkpoint_the_run_is_ok(ranks, words, cause, reason):
    task = replace(TASK, checkpoint="/scratch/x")
    result = classify(progress_of(ranks), task, words.get("end"), outage=words.get("lost"))
    assert (result.status, result.cause, result.suspect_hosts) == ("ok", None, ())
    assert len(result.step_times_s) == 6
    assert result.checkpoint_cause == cause
    assert reason is result.checkpoint_reason or reason in result.checkpoint_reason
    numbers = {name: getattr(result, f"checkpoint_{name}") for name in NUMBERS}
    assert numbers == (NUMBERS if cause is None else dict.fromkeys(NUMBERS))


def test_a_run_that_fails_before_its_checkpoint_tells_only_its_own_end():
    result = classify(progress_of([logged(KEY_ERROR)]), replace(TASK, checkpoint="/scratch/x"), None)
    assert (result.status, result.checkpoint_cause) == ("crash", None)


@pytest.mark.parametrize(
    ("ranks", "words", "status", "cause", "suspects"),
    [
        # What the agent decided: a lost node, the end of the allocation, a missed deadline.
        ([PEER, PEER, killed(), PEER], {"lost": GONE}, "node_fail", "agent_gone", ["gpu03"]),
        ([PEER, failing("oom", "MemoryError"), PEER, PEER], {"lost": GONE}, "oom", "cpu_oom", []),
        ([PEER, failing("exception", "E: x"), PEER, PEER], {"lost": GONE}, "node_fail", "agent_gone", ["gpu03"]),
        ([PEER, logged("", code=-15), PEER, PEER], {"end": CANCELLED}, "cancelled", "stopped", []),
        ([killed(), killed()], {"end": HANG}, "hang", "hang", []),
        # A cause that a rank reported is believed before the deadline that it led to.
        ([killed(), failing("oom", "MemoryError")], {"end": HANG}, "oom", "cpu_oom", []),
        ([killed(), failing("non_finite", "inf")], {"end": CANCELLED}, "invalid", "non_finite_loss", []),
        ([killed(steps=steps_with(1, loss=math.nan))], {"end": HANG}, "invalid", "non_finite_loss", []),
        # The log of a rank that was killed proves nothing, but for an exception that nobody caught at its end.
        ([killed(tail="MemoryError in a thread, handled")], {"end": HANG}, "hang", "hang", []),
        ([killed(), killed(tail=KEY_ERROR + "on\n" * 9)], {"end": HANG}, "hang", "hang", []),
        # A host is a suspect if all its ranks, here one, failed by themselves and no other host's did.
        ([PEER, logged("", code=-7), PEER, PEER], {}, "crash", "bus_error", ["gpu02"]),
        ([logged("DistBackendError: NCCL error\nLast error:\ngpu01:17:42 [0] NCCL WARN closed by peer gpu04<44321>"),
          PEER, PEER, PEER], {}, "comm_error", "nccl_error", ["gpu04"]),
        ([PEER, PEER, killed(), PEER], {}, "comm_error", "connection_error", []),
        ([failing("comm", "late", failed_at_s=9.0), failing("comm", "first", failed_at_s=3.0)], {},
         "comm_error", "connection_error", []),
        # A rank that ended with 0 while others needed it; one that was done may end before the others fail.
        ([killed(), logged("", code=0), killed(), killed()], {"end": TIMEOUT}, "timeout", "time_limit", []),
        ([PEER, DONE, PEER, PEER], {}, "comm_error", "connection_error", []),
        ([logged("", code=3), logged("", code=0), PEER, PEER], {}, "crash", "exit_code", ["gpu01"]),
        ([*[logged("", code=0)] * 3, killed()], {"end": HANG}, "hang", "hang", []),
        ([killed(), logged("", code=0)], {"end": HANG}, "crash", "exited_early", ["gpu03"]),
        ([killed(evidence=NO_EVIDENCE | {"state": "T"}), logged("", code=0)], {"end": HANG}, "hang", "hang", []),
    ],
)  # fmt: skip
def test_causes_and_suspects(ranks, words, status, cause, suspects):
    run = judged(*ranks, **words)
    assert (run.status, run.cause, list(run.suspect_hosts)) == (status, cause, suspects), run.reason
    assert ("hang_cause" in run.evidence) == (words.get("end") is HANG)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([PEER, DONE, failing("oom", "MemoryError", failed_at_s=9.0)], "out of memory, rank 2 on gpu03: MemoryError"),
        ([DONE, logged("", code=0, phase="join")],
         "exited before it was done, rank 1 on gpu03: exited with code 0 in phase join while other ranks kept running"),
        ([DONE, DONE], None),
    ],
)  # fmt: skip
def test_a_preflight_names_the_rank_that_failed_and_measures_no_steps(ranks, reason):
    progress = progress_of([replace(rank, steps=[]) for rank in ranks])
    progress.probe_rates, progress.environment = {"hbm_bytes_per_s": 1e12}, {"gpu_name": "A100"}
    result = classify(progress, replace(TASK, probe=True, gpu_names=("H100",)), None)
    assert (result.status == Status.OK, result.reason) == (reason is None, reason)


def test_the_facts_of_an_ok_run():
    done_event = {"event": "done", "stopped": "interval", "hardware_flops_per_step": 4e9}
    progress = progress_of([
        ok(done_line=done_event | {"graphs": 1}, memory_report={"allocated_bytes": 10, "reserved_bytes": 30},
           steps=steps_with(0, gradient_norm=2.5)),
        ok(done_line=done_event | {"graphs": 2}, memory_report={"allocated_bytes": 20, "reserved_bytes": 25}),
    ])  # fmt: skip
    progress.environment = {"gpu_name": "cpu", "torch_version": "2.13.0", "omp_num_threads": 1}
    options = {"attention": "cudnn", "tp": 2, "compile": False}
    progress.add([{"rank": 0, "line": parse_line(json.dumps({"event": "ran", "options": options}))}])
    progress.first_step_s = progress.started_s + 1.5
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
    unknown = ("loss_final", "ci_reached", "peak_mem_allocated_bytes", "peak_mem_reserved_rank0_bytes",
               "hardware_flops_per_step", "graphs", "attention", "gpu_name")  # fmt: skip
    assert {name: getattr(result, name) for name in unknown} == dict.fromkeys(unknown)


def test_an_interval_too_wide_is_still_ok():
    result = judged(ok(steps=[{**s, "seconds": 0.1 + n % 2} for n, s in enumerate(STEPS)]))
    assert (result.status, result.ci_reached) == (Status.OK, False)


def test_failures_leave_evidence_of_every_rank():
    result = judged(PEER, logged("a\nbye\n", code=3, phase="measure", microbatches=7))
    first, second = result.evidence["ranks"]
    assert first["error"] == "RuntimeError: Connection closed by peer"
    names = ("rank", "code", "phase", "microbatches", "last_line")
    assert [second[name] for name in names] == [1, 3, "measure", 7, "bye"]


GIB = 2**30
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.10 GiB of which 1.03 GiB is free. Including non-PyTorch memory, this process has {} GiB memory in use."
)
ALL, HALF = NEW.format("78.06"), NEW.format("38.06")
PLAIN = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
FREE = {"free_bytes": 78 * GIB, "total_bytes": 79 * GIB}
SHARED = {"free_bytes": 60 * GIB, "total_bytes": 79 * GIB}
FULL = {"torch_bytes": 74 * GIB, "free_bytes": 0.2 * GIB, "total_bytes": 79 * GIB}
CPU = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1000 bytes."
FOREIGN = ("crash", "foreign_memory", None, ("gpu03",))


def lacking(confirmed, cause="cuda_oom"):
    return "oom", cause, confirmed, ()


@pytest.mark.parametrize(
    ("message", "memory", "error", "expected"),
    [
        # All of it was free, or the allocator says that this process has all that is not.
        (ALL, FREE, {}, lacking(True)),
        (ALL, {}, {}, lacking(True)),
        (PLAIN, FREE, FULL, lacking(True)),
        # Somebody else was there before, or came later.
        (ALL, SHARED, {}, FOREIGN),
        (HALF, FREE, {}, FOREIGN),
        (HALF, {}, {}, FOREIGN),
        # Nothing tells, or too little.
        (PLAIN, {}, {}, lacking(False)),
        (PLAIN, FREE, {}, lacking(False)),
        (PLAIN, FREE, {**FULL, "torch_bytes": 30 * GIB}, lacking(False)),
        (PLAIN, {}, {**FULL, "total_bytes": 0}, lacking(False)),
        # A CPU rank has a limit; where there was room under it, something else had no memory.
        (CPU, {"limit_bytes": 5000}, {"data_bytes": 3600}, lacking(True, "cpu_oom")),
        ("MemoryError", {"limit_bytes": 5000}, {"data_bytes": 4500}, lacking(True, "cpu_oom")),
        (CPU, {"limit_bytes": 5000}, {}, lacking(True, "cpu_oom")),
        (CPU, {"limit_bytes": 9000}, {"data_bytes": 4500}, lacking(False, "cpu_oom")),
        (CPU, {}, {"data_bytes": 4500}, lacking(False, "cpu_oom")),
    ],
)
def test_whether_a_run_itself_filled_its_memory(message, memory, error, expected):
    rank = failing("oom", message, memory_report=memory)
    result = judged(RankProgress(), replace(rank, error_line=rank.error_line | error))
    assert (result.status, result.cause, result.confirmed, result.suspect_hosts) == expected


@pytest.mark.parametrize(
    ("membership", "counter"),
    [
        ("4:memory:/slurm/job_7\n0::/\n", "memory/slurm/job_7/memory.oom_control"),
        ("0::/system.slice/job_7\n", "system.slice/job_7/memory.events"),
        ("3:cpu,memory:/a\n", "memory/a/memory.oom_control"),
    ],
)
def test_kills_in_the_own_cgroup_count_and_else_those_of_the_host(tmp_path, membership, counter):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert num_oom_kills(proc, cgroups) == 0
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(membership)
    (proc / "vmstat").write_text("pgfault 3\noom_kill 7\n")
    assert num_oom_kills(proc, cgroups) == 7
    (cgroups / counter).parent.mkdir(parents=True)
    (cgroups / counter).write_text("oom_kill_disable 0\noom 9\noom_kill 2\n")
    assert num_oom_kills(proc, cgroups) == 2


STACK = """Traceback (most recent call last):
  File "{root}/{name}", line {number}, in step
    loss = model(x)
  File "{root}/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 116, in forward
    return F.linear(input)
"""


def print_of(line="ValueError: x", cause="exception", phase="measure", **place):
    stack = STACK.format(**{"root": "/src/a", "number": 7, "name": "train.py", **place})
    return fingerprint(cause, phase, line, stack, ("gpu03", "gpu04"))


@pytest.mark.parametrize(
    ("text", "other", "equal"),
    [
        ("Tried to allocate 2.00 GiB", "Tried to allocate 512.00 MiB", True),
        ("Connection closed by peer [10.0.0.7]:39851", "Connection closed by peer [10.0.1.12]:4711", True),
        ("rank 3: loss is nan at step 17", "rank 12: loss is nan at step 4", True),
        ("fault at 0x7f3e00a1", "fault at 0x55aa1234", True),
        ("cannot open /scratch/job17/gpu03/data.bin", "cannot open /scratch/job18/gpu04/data.bin", True),
        ("gpu03.cluster: bus error", "gpu04.cluster: bus error", True),
        ("took 1.5e-3 s in f3a9c01b77", "took 12 s in 0011aabbcc", True),
        ("KeyError: 'lr'", "KeyError: 'wd'", False),
        ("expected Float but found BFloat16", "expected Float but found Float8", False),
        ("cannot open /data/train.bin", "cannot open /data/valid.bin", False),
        ("libcudart.so.12: not found", "libnccl.so.2: not found", False),
    ],
)
def test_numbers_folders_and_hosts_do_not_count_in_a_fingerprint(text, other, equal):
    assert (print_of(text) == print_of(other)) == equal


def test_cause_phase_and_own_frames_count_in_a_fingerprint():
    assert print_of(root="/scratch/b", number=9) == print_of()
    others = print_of(cause="assertion"), print_of(phase="build"), print_of(name="eval.py")
    assert len({print_of(), *others}) == 4


GPU_TASK = replace(
    TASK, device="cuda",
    spec=replace(TASK.spec, kernel=replace(TASK.spec.kernel, memory_line="(?P<reserved_gib>.)",
        mfu_line="(?P<percent>.)")),
)  # fmt: skip


def observed(*, mfus=(), reserved=0, task=GPU_TASK):
    rank = ok()
    for mfu in mfus:
        rank.record_observed({"event": "observed", "mfu": mfu})
    for part in (reserved, reserved // 2):  # some programs reset their peaks
        rank.record_observed({"event": "observed", "reserved_bytes": part})
    return classify(progress_of([rank]), task, None)


def test_memory_and_mfu_of_a_log_are_the_largest_peak_and_the_median_of_the_measured_steps():
    result = observed(mfus=[0.01, 0.02, *[0.4] * 4, 0.5, 0.6], reserved=2**30)
    assert (result.status, result.peak_mem_reserved_bytes, result.source_mfu) == ("ok", 2**30, 0.4)
    assert result.peak_mem_reserved_rank0_bytes == 2**30
    assert observed(mfus=[0.4, 0.3, 0.2]).source_mfu == 0.3, "a program may print fewer of them than steps"
    assert observed().source_mfu is None


def test_impossible_memory_or_mfu_of_a_log_makes_the_run_invalid_as_one_that_is_not_measured():
    result = observed(mfus=[40.0] * 8)
    assert (result.status, result.cause) == ("invalid", "unmeasured")
    assert result.reason.startswith("kernel.mfu_line misreads the log of rank 0: MFU 40 is above 1; ")
    result = observed(reserved=2**31)
    assert (result.status, result.cause) == ("invalid", "unmeasured")
    assert "kernel.memory_line misreads the log of rank 0: 2 GiB exceeds the 1.02 GiB" in result.reason
    assert observed(mfus=[1.4, *[0.4] * 7], reserved=2**30).status == "ok"
    assert observed(reserved=2**31, task=replace(GPU_TASK, device="cpu")).status == "ok"


def test_memory_and_mfu_of_a_log_are_no_progress_of_a_rank():
    """A program that prints its memory early may still need long for its first step."""
    progress = AttemptProgress(2, ("n0",))
    progress.add([{"rank": 1, "line": {"event": "observed", "reserved_bytes": 5}}], now_s=7.0)
    rank = progress.ranks[1]
    assert (rank.memory_report, rank.last_progress_s, progress.has_reported) == (
        {"reserved_bytes": 5},
        0.0,
        False,
    )
