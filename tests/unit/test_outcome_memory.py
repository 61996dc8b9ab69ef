"""Who used the memory that was lacking, by the numbers of allocators, limits and Linux."""

import pytest

from tests.unit.one_node import task
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.ranks.node import oom_kills
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress

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


def judged(message, memory=None, error=None):
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
        assert judged(message, memory, error) == ("crash", "foreign_memory", None, ("gpu02",))
    else:
        assert judged(message, memory, error) == ("oom", "cuda_oom", expected, ())


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
    assert judged(message, memory, error) == ("oom", "cpu_oom", confirmed, ())


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
