"""A stand-in for a user's training program that misbehaves on demand; see the tests beside it.

python program.py WITNESS BEHAVIOUR RUN_ID REPEAT ATTEMPT

BEHAVIOUR is a word, or one for each micro-batch size such as 1:raise,2:kill. What a limit or a faster run is to end
goes on until it is killed, so that no load lets it end by itself: endless, stuck (without a step) and hang.
The behaviour bad fails at once, and bad_gpu01 on that node of a cluster only. The behaviour receive calls a collective
in each step: the last rank never enters the sixth, nor does it send to rank 0, which receives.
Ranks of until_asked stand still in their sixth step until they are asked for their stacks,
and take longer for the others than an agent waits for an answer. The behaviour end_all signals all ranks
and then the agent.
"""

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time

witness, behaviour, *key = sys.argv[1:]
rank = int(os.environ["RANK"])
spec = json.load(open(os.environ["ULTRABENCH_SPEC"]))["spec"]
if ":" in behaviour:
    behaviour = dict(b.split(":") for b in behaviour.split(","))[str(spec["layout"]["mbs"])]
if rank == 0:
    fd = os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, (" ".join(key) + "\n").encode())
    os.close(fd)
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)


def say(event, **values):
    print(json.dumps({"event": event, **values}), file=report)


NONSENSE = {
    "huge": '{"event": "step", "seconds": 1e308}',
    "fields": '{"event": "phase", "name": [NaN], "time": NaN}\n{"event": "environment", "variables": [],'
    ' "omp_num_threads": "x"}\n{"event": "store", "port": 99999999}\n{"event": "memory", "reserved_bytes": NaN}',
}
dist = None
if behaviour == "receive":
    import torch
    import torch.distributed as dist

    from ultrabench.kernel.rank import stack_dump
    from ultrabench.rank_report import Report

    stack_dump.dump_on_signals(Report.from_environment())
    dist.init_process_group("gloo")


def lose_time():
    time.sleep(1000)


if behaviour == "until_asked":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    say("stack_dump", pid=os.getpid())
say("phase", name="train")
if behaviour in ("bad_gpu01", "bad") and (behaviour == "bad" or os.environ.get("SLURMD_NODENAME") == "gpu01"):
    print("RuntimeError: the frobnicator is in state 7", flush=True)
    sys.exit(1)
step_s = float(os.environ.get("STEP_S", "0.002"))
if behaviour == "slow_first" and key[2] == "0":
    step_s = 20.0
if behaviour == "endless":
    step_s = 0.2
scratch = os.path.dirname(os.environ["ULTRABENCH_REPORT"])
if behaviour == "litter" and rank == spec["layout"]["dp"] - 1:
    for number in range(1000):
        open(f"{scratch}/file{number}", "w").close()
if behaviour == "stop_server":  # its parent
    os.kill(os.getppid(), signal.SIGSTOP)
ends = {"kill_agent": spec["layout"]["dp"] - 1, "kill_leader": 0, "end_agent": rank, "end_all": rank}
if rank == ends.get(behaviour):
    agent = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
    if behaviour == "end_all":
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -TERM {agent}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(agent, signal.SIGTERM if behaviour == "end_agent" else signal.SIGKILL)
    lose_time()
if behaviour == "endless_trace" and rank == 0:
    os.mkdir(f"{scratch}/profile")
    os.symlink("/dev/zero", f"{scratch}/profile/trace")
    os.symlink("/dev/zero", f"{scratch}/rank7.log")
if behaviour in ("fill", "fill_briefly"):
    folder, emptied = os.environ["TMPDIR"], "-".join(("emptied", *sys.argv[-3:]))
    if behaviour == "fill" or rank == 0:
        with contextlib.suppress(OSError), open(f"{folder}/ballast", "wb", buffering=0) as ballast:
            while ballast.write(bytes(2**16)) == 2**16:
                pass
    if behaviour == "fill_briefly":
        if rank == 0:
            time.sleep(3)
            os.unlink(f"{folder}/ballast")
            os.mkdir(f"{folder}/{emptied}")
        # A rank that ends earlier would have the others killed while the disk is full.
        while not os.path.isdir(f"{folder}/{emptied}"):
            time.sleep(0.1)
        time.sleep(2)
    os._exit(120)
for step in itertools.count(1) if behaviour == "endless" else range(1, 13):
    time.sleep(step_s)
    loss = 10.0 / step
    if step == 6 and rank == spec["layout"]["dp"] - 1:
        if behaviour == "raise":
            raise RuntimeError("planted error")
        if behaviour == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "memory":
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
            hog = bytearray(2**30)
        if behaviour in NONSENSE:
            print(NONSENSE[behaviour], file=report)
        if behaviour == "orphans":
            subprocess.Popen(
                [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN);"
                 "time.sleep(1000)"], start_new_session=True)  # fmt: skip
            raise RuntimeError("left an orphan")
    late = dist and rank == dist.get_world_size() - 1
    if (behaviour, step) in (("hang", 6), ("stuck", 1)) or (late and step == 6):
        lose_time()
    if (behaviour, step) == ("until_asked", 6):
        signal.pause()
        step_s = 0.7
    if (behaviour, step, rank) == ("receive", 6, 0):
        dist.recv(torch.ones(4), dist.get_world_size() - 1)
    if dist:
        dist.all_reduce(torch.ones(4))
    if behaviour == "nan" and step > 4:
        loss = float("nan")
    say("step", step=step, seconds=step_s, loss=loss)
say("memory", allocated_bytes=2**20, reserved_bytes=2**21)
say("done")
