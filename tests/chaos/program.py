"""A program that acts as training: it meets the other ranks in every step and carries out orders.

python program.py FOLDER SWEEP RUN_ID REPEAT ATTEMPT

FOLDER/witness.txt gets a line for the start, every step and the end of every execution (see witness.py).
FOLDER/bad may hold a file NODE, whose text all ranks on this node print before they fail.
FOLDER/orders may hold a file KIND.NUMBER.SHARE: the first rank at SHARE of its world that sees the file takes
it and does what KIND says. FOLDER/always may hold a file SWEEP.RUN_ID.REPEAT with a share: the rank at this
share kills the agent of its node in every attempt.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

folder, sweep, *key = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
STEP_S = 0.08
fills = []
"""Orders to fill the file system of the results at the end of this run."""
IGNORES_TERM = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"

allocation = os.environ["ULTRABENCH_TAG"].split(":")[0]


def ancestors():
    """The pids of the parent of this process, of its parent, and so on."""
    pid = os.getpid()
    while (pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) > 1:  # proc(5)
        yield pid


def words_of(pid: int, file: str) -> list[str]:
    return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")


def of_the_agent(variable: str) -> str:
    """A variable of Slurm, which is hidden from ranks, from the nearest ancestor that has it."""
    entries = (entry for pid in ancestors() for entry in words_of(pid, "environ"))
    return next((entry.partition("=")[2] for entry in entries if entry.startswith(f"{variable}=")), "?")


host = ":".join(of_the_agent(name) for name in ("SLURM_CLUSTER_NAME", "SLURMD_NODENAME"))
# with its start time, proc(5)
process = f"{os.getpid()}:{Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19]}"
HOSTILE = (
    '{"event": "step", "step": %(step)d, "seconds": 0.0, "loss": 1.0}',
    '{"event": "step", "step": %(step)d, "seconds": 1e308, "loss": 1e308}',
    '{"event": "step", "step": %(step)d, "seconds": 1' + 400 * "0" + ', "tokens": 1' + 400 * "0" + "}",
    '{"event": "step", "step": NaN, "seconds": NaN, "loss": NaN, "tokens": -Infinity}',
    '{"event": "step", "step": %(step)d, "loss": ' + 100_000 * "[" + 100_000 * "]" + "}",
    '{"event": "memory", "allocated_bytes": [1], "reserved_bytes": {"a": []}}\n'
    '{"event": "environment", "gpu_name": [], "versions": 7}\n{"event": "error", "kind": [], "message": {}}',
    'null\n[]\n0\n"step"\n{"event": null}\n{"event": "phase", "name": ["train"]}\n{"event": "done", "checksum": []}',
    "\x00\udcff\udcfe\udc80{]}\r\x0b\u2028{\x1b",
    "\n".join('{"event": "step", "step": %(step)d, "seconds": 0.001, "loss": 1.0}' for _ in range(60_000)),
    '{"event": "step", "step": 1' + 400 * "0" + ', "seconds": -1.0, "loss": "a", "tokens": []}',
)
"""Values that a rank may report although they are no measurements."""
SMALL_FILES = 10_000
"""Files that a run leaves in its folder; removing them at 1 ms each takes longer than three heartbeats."""
REFORKING = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end = time.monotonic() + 60  # they end by themselves where nobody ends them
for _ in range(6):
    if os.fork() == 0:
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            os.setsid()
            time.sleep(0.002)
        os._exit(0)
"""


def witness(event):
    if rank == 0:
        line = f"{sweep} {' '.join(key)} {event} {allocation} {host} {process} {time.monotonic():.3f}\n"
        with open(f"{folder}/witness.txt", "ab", buffering=0) as file:
            file.write(line.encode())


witness("start")
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)


def say(event, **values):
    print(json.dumps({"event": event, **values}), file=report)


def meet():
    """The sockets to other ranks: rank 0 has one to each rank, each other rank has one to rank 0."""
    if rank == 0:
        server = socket.create_server(place, backlog=world)
        return [server.accept()[0] for _ in range(world - 1)]
    while True:
        try:
            peer = socket.create_connection(place)
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return [peer]


def reduce(peers):
    """Waits until every rank has called it."""
    if rank != 0:
        peers[0].sendall(b"x")
    for peer in peers:
        if peer.recv(1) != b"x":
            raise ConnectionError(f"rank {rank}: Connection closed by peer in all_reduce")
    for peer in peers if rank == 0 else ():
        peer.sendall(b"x")


def kill_the_agent():
    """Kills the agent of this node if an order for this run says so, as Linux may do where memory is short."""
    always = Path(folder, "always", f"{sweep}.{key[0]}.{key[1]}")
    if always.exists() and rank == int(always.read_text()) * world // 100:
        os.kill(
            next(pid for pid in ancestors() if "ultrabench.agent" in words_of(pid, "cmdline")), signal.SIGKILL
        )
        time.sleep(1000)


def obey():
    """Takes an order for this rank and carries it out; a rename makes sure that only one rank takes it."""
    for order in Path(folder, "orders").glob("*.*.*"):
        kind, number, share = order.name.split(".")
        if rank != int(share) * world // 100:
            continue
        receipt = {"sweep": sweep, "key": ".".join(key), "allocation": allocation, "rank": rank}
        try:
            order.rename(Path(folder, "taken", number))
        except FileNotFoundError:
            continue
        Path(folder, "taken", f"{number}.json").write_text(json.dumps(receipt))
        if kind == "sleep_rank":
            time.sleep(1000)
        elif kind == "exit_rank":
            sys.exit(0)
        elif kind == "orphan":
            subprocess.Popen([sys.executable, "-c", IGNORES_TERM], start_new_session=True)
        elif kind == "hostile_numbers":
            text = HOSTILE[int(share) % len(HOSTILE)].replace("%(step)d", str(step))
            report.flush()
            report.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
            report.buffer.flush()
        elif kind == "reforking_children":
            # The children are found by the last word, since their environment may be cleared.
            subprocess.Popen([sys.executable, "-c", REFORKING, f"{folder}/reforking.{number}"])
        elif kind == "slow_unlink":
            small = Path(os.environ["ULTRABENCH_REPORT"]).with_name(f"small_files.{number}")
            small.mkdir()
            for n in range(SMALL_FILES):
                os.close(os.open(small / str(n), os.O_CREAT))
        elif kind == "full_at_end":
            fills.append(number)
        elif kind == "kill_agent_always":
            Path(folder, "always", f"{sweep}.{key[0]}.{key[1]}").write_text(share)


def fill_results(number):
    """Fills the file system of the results; the chaos campaign removes the file."""
    filler = Path(folder, f"results/filler.{number}")
    with open(filler, "wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:  # the file system is full
                pass
    Path(folder, "taken", f"{number}.full").touch()


say("phase", name="train")
bad = Path(folder, "bad", host.partition(":")[2])
if bad.exists():
    print(bad.read_text(), flush=True)
    sys.exit(1)
peers = meet()
for step in range(1, 13):
    started = time.monotonic()
    time.sleep(STEP_S)
    obey()
    kill_the_agent()
    reduce(peers)
    witness("step")
    say("step", step=step, seconds=time.monotonic() - started, loss=10.0 / step)
witness("end")
say("memory", allocated_bytes=2**20, reserved_bytes=2**21)
for number in fills:
    fill_results(number)
say("done")
