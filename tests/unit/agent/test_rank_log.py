"""The cause comes from the whole log of a rank: a text in its middle counts, whatever noise is around it."""

import json
import random
from contextlib import closing
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.unit.agent.test_cleanup import OneNode
from tests.unit.agent.test_corpus import CORPUS, STACK, TASK
from ultrabench.agent.diagnose.families import FAMILIES
from ultrabench.agent.diagnose.log_record import NUM_FIRST, NUM_LAST, TAIL_BYTES, FailureKind, record_of
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.ranks.fork_server import RANK_OOM_SCORE
from ultrabench.agent.ranks.rank_log import read_log
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.record import to_dict

TEXTS = json.loads((CORPUS / "families.json").read_text())
PEERS = [
    (1, f"{STACK}RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:39851\n"),
    (
        1,
        f"{STACK}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited\n",
    ),
    (
        -6,
        "[rank0]:[E1124 03:00:00.1 ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout: WorkNCCL\n",
    ),
]
NOISE_LINES = [
    f"iteration {n}/20000 | consumed tokens: {4096 * n} | loss {10 / n:.4f}" for n in range(1, 3000)
] + [
    "[W1124 10:00:00.1 socket.cpp:697] [c10d] The client socket has failed to connect to [gpu01]:22456 (errno: 22)",
    "wandb: ERROR Error while calling W&B API: Connection refused",
    "WARNING: CUDA out of memory in the evaluation, which is left out",
]
NOTES_AFTER = [f"gpu01:{n}:99 [0] NCCL INFO comm 0x7f{n:04x} rank 0 nranks 8 - Abort COMPLETE" for n in range(1,
    3000)] + [
    "[W1124 10:00:00.1 socket.cpp:697] [c10d] The client socket has failed to connect to [gpu01]:22456 (errno: 22)",
    "wandb: ERROR Error while calling W&B API: Connection refused",
    "WARNING: CUDA out of memory in the evaluation, which is left out",
]  # fmt: skip
"""What libraries and loggers write while a process ends; steps behind an exception would mean that it was caught."""
HALF_BYTES = 5 * 10**6


@pytest.fixture(scope="module")
def noise():
    """Five megabytes of progress, with warnings that mean nothing."""
    return shuffled(NOISE_LINES)


@pytest.fixture(scope="module")
def notes_after():
    """Five megabytes of what libraries and loggers write while a process ends."""
    return shuffled(NOTES_AFTER)


def shuffled(lines):
    """HALF_BYTES of these lines, in an order by chance."""
    text = "\n".join(random.Random(7).sample(lines, len(lines))).encode() + b"\n"
    return (text * (HALF_BYTES // len(text) + 1))[:HALF_BYTES].rpartition(b"\n")[0] + b"\n"


def planted(folder, noise, *parts):
    """A log with these texts after one another, and noise before, between and after them."""
    path = folder / "rank.log"
    path.write_bytes(noise.join([b"", *(part.encode() for part in parts), b""]))
    return path


def ended(progress, number, code, record):
    progress.add([{"rank": number, "code": code}, {"rank": number, "log": to_dict(record)}], now_s=1.0)


@pytest.mark.parametrize("example", TEXTS, ids=lambda example: example["name"])
def test_a_text_in_the_middle_of_a_log_is_the_cause(example, noise, notes_after, tmp_path):
    chance = random.Random(example["name"])
    num_ranks = chance.choice((2, 4, 8, 16, 32, 64))
    culprit = chance.randrange(num_ranks)
    text = (STACK if example["traceback"] else "") + "\n".join(example["text"]) + "\n"
    for before, after in ((noise, notes_after), (b"step\n", b"step\n")):
        log = tmp_path / "rank.log"
        log.write_bytes(before + text.encode() + after)
        progress = AttemptProgress(num_ranks, [f"gpu{n:02}" for n in range(max(1, num_ranks // 8))])
        for number in chance.sample(range(num_ranks), num_ranks):
            code, peer_text = chance.choice(PEERS)
            is_alike = example["status"] == "comm_error"
            is_culprit = number == culprit or is_alike
            record = read_log(log) if number == culprit else record_of(text if is_alike else peer_text)
            ended(progress, number, example["code"] if is_culprit else code, record)
        result = classify(progress, TASK, None)
        assert (result.status, result.cause) == (example["status"], example["cause"]), result.reason
        assert example["status"] == "comm_error" or f"rank {culprit} on " in result.reason


def test_every_family_has_a_text():
    assert {family.name for family in FAMILIES} == {example["family"] for example in TEXTS} - {None}


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
DUMP = 'Thread 0x00007f0000000001 (most recent call first):\n  File "/opt/threading.py", line 359 in wait\n\n'
FRAME = (
    "frame #1: c10d::ProcessGroupNCCL::watchdogHandler() + 0x233 (0x7f3079fb6f86 in "
    "/opt/torch/lib/libtorch_cuda.so)\n"
)
WATCHDOG = (
    "[rank3]:[E1124 11:43:02.2 ProcessGroupNCCL.cpp:1899] [PG ID 5 Rank 3] Process group watchdog thread terminated "
    "with exception: CUDA error: {}\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
)
TIMEOUT = (
    "[rank3]:[E1124 02:07:08.4 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
)
WARNED = (
    "[W1124 10:00:00.1 socket.cpp:697] [c10d] The client socket has failed to connect to [gpu01]:22456.\n"
)
PROGRESS = "iteration 3/200 | loss 2.5\n"
LOKY = (
    f"{STACK}joblib.externals.loky.process_executor.TerminatedWorkerError: A worker process managed by "
    "the executor was "
    "unexpectedly terminated.\n\nThe exit codes of the workers are {SIGKILL(-9)}\n"
)
REMOTE_ERROR = (
    f"{STACK}torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3699, "
    "remote process exited\n"
)
CHILD_FAILED = (
    f"{STACK}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    f"\n{'=' * 60}\ntrain.py FAILED\n"
)
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/src/train.py", line 7, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/src/train.py", line 4, in step
    |     loss.backward()
    | {}
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/src/train.py", line 5, in wait
    | asyncio.exceptions.CancelledError
    +------------------------------------
"""
TABLE = (
    f"{CHILD_FAILED}Failures:\n[1]:\n  time      : 2026-11-24_10:00:00\n  exitcode  : -6 (pid: 11)\n"
    "  traceback : To enable traceback see: https://pytorch.org\n----------\nRoot Cause (first observed "
    "failure):\n[0]:\n"
    "  rank      : 0 (local_rank: 0)\n  exitcode  : {first} (pid: 10)\n==========\n"
)
RECORDED = (
    f"{CHILD_FAILED}Root Cause (first observed failure):\n[0]:\n  exitcode  : 1 (pid: 10)\n"
    '  traceback : Traceback (most recent call last):\n    File "/src/train.py", line 7, '
    "in main\n      step()\n  {}\n  \n==========\n"
)
RICH = """\
\u256d\u2500\u2500 Traceback (most recent call last) \u2500\u2500\u256e
\u2502 /src/train.py:19 in <module>              \u2502
\u2502   15 \u2502   raise OutOfMemoryError("CUDA out of memory") \u2502
\u2502 \u2771 18 \u2502   load("/tmp")                       \u2502
\u2570\u2500\u2500\u2500\u2500\u256f
"""


def cause_of(text, code=1, *, killed_by_us=False, oom_killed=False):
    progress = AttemptProgress(1, ["gpu01"])
    progress.ranks[0].killed_by_us = killed_by_us
    progress.add([{"rank": 0, "code": code, "oom_killed": oom_killed}])
    progress.add([{"rank": 0, "log": to_dict(record_of(text))}])
    return classify(progress, TASK, None).cause


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        # What follows the exception that ended the program does not count.
        (f"{STACK}{OOM}\nException ignored in: <function Loader.__del__ at 0x7f>\n{STACK}AssertionError: "
        "can only test a child\n",
         1, "cuda_oom"),
        (f"{STACK}{OOM}\nException ignored in atexit callback: <function f>\n{STACK}RuntimeError: "
        "CUDA error: an illegal "
         "memory access was encountered\n", 1, "cuda_oom"),
        (f"{STACK}{OOM}\nError in atexit._run_exitfuncs:\n{STACK}OSError: [Errno 28] No space left on device\n", 1,
            "cuda_oom"),
        (f"[rank3]: {STACK}{OOM}\n{CHILD_FAILED}", 1, "cuda_oom"),
        (f"{STACK}{OOM}\n{STACK}ConnectionResetError: [Errno 104] Connection reset by peer\n", 1, "cuda_oom"),
        (f"{STACK}{OOM}\n{PROGRESS * 9}{STACK}BrokenPipeError: [Errno 32] Broken pipe\n", 1, "cuda_oom"),
        (f"{STACK}KeyError: 'lr'\n{PROGRESS * 12}", 1, "exception"),
        (f"{STACK}KeyError: 'lr'\nwandb: Network error (ConnectionError), entering retry loop.\n", 1, "exception"),
        ("".join(f"node7: {line}\n" for line in f"{STACK}{OOM}".splitlines())
         + "node7: [2026-02-03 04:05:06,7] [INFO] [launch.py:316:sigkill_handler] Killing subprocess 4711\n" * 12, 1,
         "cuda_oom"),
        # Whatever a launcher or a progress bar puts before it.
        ("".join(f"2025-11-24T10:00:0{n}.123Z {line}\n" for n, line in enumerate(f"{STACK}{OOM}".splitlines())), 1,
            "cuda_oom"),
        ("".join(f"[1,3]<stderr>: {line}\n" for line in f"{STACK}{OOM}".splitlines()), 1, "cuda_oom"),
        ("".join(f"(TrainWorker pid=77, ip=10.0.0.2) {line}\n" for line in f"{STACK}{OOM}".splitlines()), 1,
            "cuda_oom"),
        ("".join(f"trainer-1  | {line}\n" for line in f"{STACK}{OOM}".splitlines()), 1, "cuda_oom"),
        ("".join(f"[default{n % 2}]:{line}\n" for line in f"{STACK}{OOM}".splitlines() for n in range(2)), 1,
            "cuda_oom"),
        (f" 5%|#    | 12/200 [00:10<02:40,  1.17it/s]{STACK}{OOM}\n", 1, "cuda_oom"),
        (f"\r 5%|#    | 12/200 [00:10<02:40, 1.17it/s, loss: {STACK}\x1b[31m{OOM}\x1b[0m\n", 1, "cuda_oom"),
        ("".join(f"  | {line}\n" for line in f"  + Exception Group {STACK}{OOM}".splitlines()), 1, "cuda_oom"),
        (f'2025-11-24 10:00:00.1 | ERROR | __main__:main:8 - An error has been caught\n{STACK}\n> File "x.py", '
        'line 3, in f\n'
         f"    g()\n{OOM}\n", 1, "cuda_oom"),
        # Exceptions that were caught do not count.
        (f"{STACK}{OOM}\n{PROGRESS * 30}{STACK}KeyError: 'lr'\n", 1, "exception"),
        (f"{STACK}{OOM}\nsmaller batch\n{STACK}KeyError: 'lr'\n", 1, "exception"),
        (f"{STACK}{OOM}\n{PROGRESS * 30}", -11, "segfault"),
        (f"{STACK}{OOM}\n{PROGRESS * 30}", 3, "exit_code"),
        (f"{STACK}{OOM}\nreducing to mbs=4\n{PROGRESS * 300}early stop\n", 1, "exit_code"),
        (f"{STACK}ImportError: No module named 'apex'\nusing torch\n{PROGRESS * 99}diverged\n", 1, "exit_code"),
        (f"{STACK}ConnectionResetError: [Errno 104] Connection reset by peer\n{PROGRESS * 99}diverged\n", 1,
            "exit_code"),
        (f"{STACK}{OOM}\n", -11, "cuda_oom"), (f"{STACK}{OOM}\n{PROGRESS}", -11, "segfault"),
        (f"{STACK}{OOM}\nWARNING: retrying with a smaller batch\n", -11, "segfault"),
        (f"{STACK}{OOM}\ntraining failed, bye\n", 3, "cuda_oom"),
        (f"E0423 09:14:43.3 13 triton_heuristics.py:780] [0/5] {STACK.splitlines()[0]}\n{STACK}KeyError: 'lr'\n", 1,
            "exception"),
        # Causes that led to each other.
        (f"{STACK}{OOM}\n\nThe above exception was the direct cause of the following "
        f"exception:\n\n{STACK}RuntimeError: x\n",
         1, "cuda_oom"),
        (f"{STACK}RuntimeError: Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal {STACK}{OOM}\n", 1,
            "cuda_oom"),
        (f"{STACK}torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following "
         f"error:\n{STACK}{OOM}\n", 1, "cuda_oom"),
        (f"Exception in thread Thread-2 (_pin_memory_loop):\n{STACK}{OOM}\n{STACK}RuntimeError: "
        "Pin memory thread exited "
         "unexpectedly\n", 1, "cuda_oom"),
        (f"{STACK}{OOM}\n{PROGRESS}Exception in thread QueueFeederThread:\n{STACK}ValueError: closed\n", 1, "cuda_oom"),
        # The exceptions of a group are its cause.
        (GROUP.format(OOM), 1, "cuda_oom"), (GROUP.format("KeyError: 'lr'"), 1, "exception"),
        # Tables of torchrun: the first observed failure counts, and what the program recorded of it.
        (f"{CHILD_FAILED}  exitcode  : -15 (pid: 6135) (SIGTERM)\n", 1, "exit_code"),
        (f"{STACK}RuntimeError: Connection reset by peer\n{TABLE.format(first=-9)}", 1, "killed"),
        (f"{STACK}{OOM}\n{TABLE.format(first=-9)}", 1, "cuda_oom"),
        (f"{STACK}KeyError: 'lr'\n{TABLE.format(first=1)}", 1, "exception"),
        (TABLE.format(first=3), 1, "exit_code"), (TABLE.format(first=-9), 1, "killed"),
        (TABLE.format(first=-11), 1, "segfault"),
        (RECORDED.format(OOM), 1, "cuda_oom"), (RECORDED.format("KeyError: 'lr'"), 1, "exception"),
        ("run.sh: line 7: 481 Terminated      python x.py\n", 1, "killed"),
        # Races in compile caches show in paths, or in frames.
        ('Traceback (most recent call last):\n  File "/env/triton/runtime/cache.py", line 70, in get_group\n    x\n'
         "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n", 1, "compile_cache"),
        (f"{STACK}json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n", 1, "exception"),
        (f"{STACK}ImportError: /scratch/.triton/cache/x/__triton_launcher.so: cannot open shared object file\n", 1,
            "compile_cache"),
        (f"{STACK}RuntimeError: DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 9223372036854775807 bytes.\n",
         1, "exception"),
        # Source lines count for nothing.
        (f"{RICH}KeyError: 'lr'\n", 1, "exception"),
        ('Traceback (most recent call last):\n  File "x.py", line 1, in f\n    raise OutOfMemoryError("CUDA out '
        'of memory")\n'
         "KeyError: 'lr'\n", 1, "exception"),
        # Dumps of stacks hide nothing.
        (WATCHDOG.format("an illegal memory access was encountered") + "Fatal Python error: Aborted\n\n" + DUMP * 300,
         -6, "illegal_memory_access"),
        (WATCHDOG.format("uncorrectable ECC error encountered") + FRAME * 200, -6, "ecc_error"),
        (TIMEOUT + "Fatal Python error: Aborted\n\n" + DUMP * 300, -6, "nccl_timeout"),
        # A word about a connection replaces no signal, unless the library itself ends the process.
        (WARNED + PROGRESS * 30, -11, "segfault"), (WARNED, -11, "segfault"), (WARNED, -6, "abort"),
        (WARNED + "train: error: unknown option --foo\n", 2, "exit_code"),
        ("ERROR: Connection refused\ntrainer: validation failed\n", 3, "exit_code"),
        (REMOTE_ERROR, -11, "segfault"), (REMOTE_ERROR, 139, "segfault"),
        (f"{REMOTE_ERROR}cleaning up\n", -11, "segfault"),
        (f"{STACK}RuntimeError: [pair.cc:534] Connection closed by peer\n", -11, "segfault"),
        (REMOTE_ERROR, -6, "nccl_error"),
        (TIMEOUT, -6, "nccl_timeout"), (TIMEOUT, -11, "nccl_timeout"),
        (f"{TIMEOUT}{STACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.\n", 1,
         "nccl_timeout"),
        # Exit codes of wrappers and the signals of children.
        ("", 139, "segfault"), ("", 134, "abort"), ("", 137, "killed"), ("", 143, "killed"), ("", 135, "bus_error"),
        ("", 136, "signal"), ("", 245, "segfault"), ("", 247, "killed"), ("", 250, "abort"), ("", 255, "exit_code"),
        ("", 128, "exit_code"),
        ("run.sh: line 7: 481 Segmentation fault      (core dumped) python x.py\n", 1, "segfault"),
        ("Fatal Python error: Segmentation fault\n\n" + DUMP, 1, "segfault"),
        ("[launch.py:325:sigkill_handler] ['python', 'x.py'] exits with return code = -11\n", 245, "segfault"),
        (f"{CHILD_FAILED}  exitcode  : -9 (pid: 48156)\n", 1, "killed"),
        (f"{STACK}KeyError: 'lr'\n{CHILD_FAILED}  exitcode  : 1 (pid: 48156)\n", 1, "exception"),
    ],
)  # fmt: skip
def test_what_decides_in_a_log(text, code, cause):
    assert cause_of(text, code) == cause


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        ("", -9, "host_oom"),
        ("", 137, "host_oom"),
        ("", 1, "host_oom"),
        (
            f"{STACK}RuntimeError: DataLoader worker (pid 31977) is killed by signal: Killed. \n",
            1,
            "host_oom",
        ),
        (f"{STACK}RuntimeError: DataLoader worker (pid(s) 22048) exited unexpectedly\n", 1, "host_oom"),
        (f"{CHILD_FAILED}  exitcode  : -9 (pid: 48156)\n", 1, "host_oom"),
        (PEERS[0][1], 1, "host_oom"),
        (f"{STACK}EOFError\n", 1, "host_oom"),
        (f"{STACK}ConnectionResetError: [Errno 104] Connection reset by peer\n", 1, "host_oom"),
        (LOKY, 1, "host_oom"),
        (f"{STACK}KeyError: 'lr'\n", 1, "exception"),
        ("", -11, "segfault"),
    ],
)
def test_a_counted_kill_for_lack_of_memory_explains_ends_without_a_reason(text, code, cause):
    assert cause_of(text, code, oom_killed=True) == cause


@pytest.mark.parametrize(("num_steps", "confirmed"), [(0, True), (3, True), (12, False)])
def test_a_lack_of_memory_with_steps_behind_it_is_not_confirmed(num_steps, confirmed):
    sizes = (
        "GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free. "
        "Including non-PyTorch memory, this process has"
    )
    progress = AttemptProgress(1, ["gpu01"])
    text = f"{STACK}{OOM} {sizes} 79.00 GiB memory in use.\n{PROGRESS * num_steps}"
    ended(progress, 0, 1, record_of(text))
    result = classify(progress, TASK, None)
    assert (result.cause, result.confirmed) == ("cuda_oom", confirmed)


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: metric 'uncorrectable ECC errors' unknown",
        "ValueError: cannot parse kernel line 'NVRM: Xid (PCI:0000:1b:00): 79'",
        "ValueError: HTTPError is not a loss name",
        "ValueError: bad value 'Broken pipe'",
        "ValueError: mode must be 'oom' or 'CUDA out of memory'",
        "AttributeError: module 'torch' has no attribute 'NCCL error'",
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff: Connection reset by peer",
        "RuntimeError: health check: GPU is lost column missing",
        "RuntimeError: expected a tensor, got 'CUDA out of memory' instead",
        'Exception: no handler for "NCCL error"',
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/gloo/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/x/watchdog got stuck for'",
        "PermissionError: [Errno 13] Permission denied: '/opt/gloo/lib.so'",
        "IsADirectoryError: [Errno 21] Is a directory: '/srv/gloo/'",
        "redis.exceptions.ConnectionError: Error 111 connecting to redis:6379. Connection refused.",
        'psycopg2.OperationalError: connection to server at "db", port 5432 failed: Connection refused',
        "pymongo.errors.AutoReconnect: db:27017: [Errno 104] Connection reset by peer",
    ],
)
def test_words_that_a_program_quotes_are_no_cause(message):
    assert cause_of(f"{STACK}{message}\n") == "exception"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("AttributeError: /opt/lib/libfused.so: undefined symbol: launch", "missing_library"),
        ("PermissionError: [Errno 30] Read-only file system: '/tmp/x'", "disk_error"),
        ("OSError: [Errno 12] Cannot allocate memory", "cpu_oom"),
        ("RuntimeError: [/src/gloo/gloo/transport/tcp/pair.cc:534] unexpected end", "gloo_error"),
        ("ConnectionResetError", "connection_error"),
        ("multiprocessing.context.AuthenticationError: Connection refused", "connection_error"),
        ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,000 bytes", "cuda_oom"),
        ("pynvml.NVMLError_GpuIsLost: GPU is lost", "xid"),
    ],
)
def test_exceptions_show_the_causes_that_their_types_can_have(message, cause):
    assert cause_of(f"{STACK}{message}\n") == cause


@pytest.mark.parametrize(
    "line",
    [
        "F1124 10:00:00.000000 7 x.cc:7] Check failed: a == b",
        "[F1124 10:00:00.5 ProcessGroupNCCL.cpp:1653] [PG ID 0 Rank 0] Terminating the process",
        "[gpu01:7:0:7] Caught signal 11 (Segmentation fault: address not mapped to object at address (nil))",
        "terminate called after throwing an instance of 'std::runtime_error'",
        "malloc(): corrupted top size",
        "python: x.cc:7: f: Assertion `a == b' failed.",
        "symbol lookup error: /opt/lib/libx.so: undefined symbol: f",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
        "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.",
    ],
)
def test_fatal_lines_are_seen_anywhere_in_a_log(line, noise, notes_after, tmp_path):
    path = tmp_path / "rank.log"
    path.write_bytes(noise + f"{line}\n".encode() + notes_after)
    assert [failure.lines for failure in read_log(path).failures] == [[line]]


@pytest.mark.parametrize(
    ("stamps", "root"), [(("02:07:08", "02:07:01"), 1), (("02:07:01", "02:07:08"), 0), (("02:07:08", ""), 0)]
)
def test_of_equal_failures_the_earliest_one_is_the_root(stamps, root):
    progress = AttemptProgress(2, ["gpu01", "gpu02"])
    for number, stamp in enumerate(stamps):
        text = f"[F1124 {stamp}.5 x.cc:7] Check failed: a == b\n" if stamp else "Check failed\n"
        ended(progress, number, -6, record_of(text))
    assert f"rank {root} on " in classify(progress, TASK, None).reason


def test_an_unread_log_is_known_until_its_record_arrives():
    progress = AttemptProgress(2, ["gpu01"])
    progress.add([{"rank": 0, "code": 0, "tail": ""}, {"rank": 1, "code": 1}])
    assert progress.has_unread_logs
    progress.add([{"rank": 1, "log": to_dict(record_of(f"{STACK}{OOM}\n"))}])
    assert not progress.has_unread_logs
    assert progress.ranks[1].tail.endswith(f"{OOM}\n")


FAILING = """
for n in range(20_000):
    print(f"iteration {n} | loss 2.5", flush=n % 1000 == 0)
    if n == 10_000:
        sys.stdout.flush()
        print('Traceback (most recent call last):\\n  File "x.py", line 1, in f\\nValueError: in the middle',
              file=sys.stderr)
print("SLURM_CONF", os.environ.get("SLURM_CONF"), os.environ.get("SLURM_NTASKS"), flush=True)
print("oom_score_adj", open("/proc/self/oom_score_adj").read(), flush=True)
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)
here()
"""


def test_a_node_sends_the_exit_of_a_rank_and_then_what_its_whole_log_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/of_this_cluster.conf")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    code = FAILING.replace("here()", "sys.exit(1)")
    events = []
    with closing(OneNode(tmp_path, f"import os, sys\n{code}")) as node:

        def has_log():
            events.extend(node.ask("node.rank_events()"))
            return any("log" in event for event in events)

        wait_until(has_log, 30)
        agent_score = int(node.ask("open('/proc/self/oom_score_adj').read()"))
    exit_event, log_event = (event for event in events if event.keys() & {"code", "log"})
    assert (exit_event["code"], "tail" in exit_event) == (1, False)
    assert [failure["lines"] for failure in log_event["log"]["failures"]] == [["ValueError: in the middle"]]
    tail_lines = log_event["log"]["tail"].splitlines()
    assert "SLURM_CONF /etc/slurm/of_this_cluster.conf None" in tail_lines, "a program may call srun"
    assert f"oom_score_adj {min(1000, agent_score + RANK_OOM_SCORE)}" in tail_lines, (
        "Linux kills ranks before agents"
    )


def test_a_record_is_small_whatever_the_log(tmp_path):
    path = tmp_path / "rank.log"
    path.write_text((f"{STACK}{OOM}{'x' * 5000}\n{PROGRESS}" + FRAME * 50) * 300)
    record = read_log(path)
    assert len(json.dumps(to_dict(record))) < 200_000
    assert len(record.failures) <= NUM_FIRST + NUM_LAST
    assert len(record.tail.encode()) <= TAIL_BYTES + 8
    assert all(failure.kind is FailureKind.EXCEPTION for failure in record.failures)


def test_the_head_and_the_end_of_a_very_large_log_are_read(noise, tmp_path):
    path = planted(
        tmp_path,
        noise,
        f"{STACK}ValueError: first\n",
        f"{STACK}ValueError: middle\n",
        f"{STACK}ValueError: last\n",
    )
    lines = [failure.lines[0] for failure in read_log(path, max_bytes=12 * 10**6).failures]
    assert lines == ["ValueError: first", "ValueError: last"]
    assert read_log(tmp_path / "missing.log").failures == []


def test_the_files_of_texts_have_own_names():
    names = [example["name"] for example in TEXTS]
    assert len(names) == len({*names})
    assert Path(CORPUS / "families.json").read_text().isascii()
