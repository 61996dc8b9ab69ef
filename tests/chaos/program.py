"""A stand-in for training that meets the other ranks in every step and obeys orders.

python program.py FOLDER SWEEP RUN_ID REPEAT ATTEMPT

FOLDER/witness.txt gets a line for every execution. FOLDER/orders may hold a file KIND.NUMBER.SHARE: the
rank at SHARE of the world that sees it first takes it and does what KIND says.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

folder, sweep, *key = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
STEP_S = 0.08
IGNORES_TERM = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"

if rank == 0:
    with open(f"{folder}/witness.txt", "ab", buffering=0) as witness:
        witness.write(f"{sweep} {' '.join(key)}\n".encode())
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)


def say(event, **values):
    print(json.dumps({"event": event, **values}), file=report)


def meet():
    """Sockets to the others: rank 0 has all of them, each of the others has rank 0's."""
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
    """Returns when every rank has called it."""
    if rank != 0:
        peers[0].sendall(b"x")
    for peer in peers:
        hear(peer)
    if rank == 0:
        for peer in peers:
            peer.sendall(b"x")


def hear(peer):
    if peer.recv(1) != b"x":
        raise ConnectionError(f"rank {rank}: Connection closed by peer in all_reduce")


def obey():
    """Takes an order that is meant for this rank."""
    for order in Path(folder, "orders").glob("*.*.*"):
        kind, number, share = order.name.split(".")
        if rank != int(share) * world // 100:
            continue
        allocation = os.environ["ULTRABENCH_TAG"].split(":")[0]
        taken = {"sweep": sweep, "key": ".".join(key), "allocation": allocation, "rank": rank}
        try:
            order.rename(Path(folder, "taken", number))
        except FileNotFoundError:
            continue
        Path(folder, "taken", f"{number}.json").write_text(json.dumps(taken))
        if kind == "sleep_rank":
            time.sleep(1000)
        elif kind == "exit_rank":
            sys.exit(0)
        elif kind == "orphan":
            subprocess.Popen([sys.executable, "-c", IGNORES_TERM], start_new_session=True)


say("phase", name="train")
peers = meet()
for step in range(1, 13):
    started = time.monotonic()
    time.sleep(STEP_S)
    obey()
    reduce(peers)
    say("step", step=step, seconds=time.monotonic() - started, loss=10.0 / step)
say("memory", allocated_bytes=2**20, reserved_bytes=2**21)
say("done")
