"""Which hosts a failed attempt points at, by what the ranks of each host did."""

from dataclasses import replace

import pytest

from tests.configs import measure
from tests.unit.agent.one_node import task
from ultrabench.agent.diagnose.addresses import AddressBook, addresses_of_host
from ultrabench.agent.diagnose.hang_cause import find_hang_cause
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.diagnose.suspects import evidence_of_ranks
from ultrabench.agent.ranks.rank_progress import NO_EVIDENCE, AttemptProgress, RankProgress

TASK = replace(task("x.py", "cpu"), measure=measure(warmup_steps=2, loss_step=3))
TRACE = 'Traceback (most recent call last):\n  File "t.py", line 1, in step\n    y = x @ x\n'


def raised(message):
    return {"code": 1, "tail": f"{TRACE}{message}\n"}


NEW = raised("ValueError: a text that nobody has listed")
KILLED = {"code": -9, "killed_by_us": True}
PEER_ERROR = raised("RuntimeError: Connection closed by peer")
NCCL = "torch.distributed.DistBackendError: NCCL error\nLast error:\n{}"
ECC = raised("RuntimeError: CUDA error: uncorrectable ECC error encountered")
PORT = raised("OSError: [Errno 98] Address already in use")
NO_GPU = raised("RuntimeError: No CUDA GPUs are available")


def closed_by(peer):
    return raised(NCCL.format(f"socketProgress: Connection closed by remote peer {peer}<44321>"))


WATCHDOG = """\
[E1124 02:07:08.4 ProcessGroupNCCL.cpp:1895] [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: \
NCCL error: remote process exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
NET/IB : Got completion from peer gpu02-ib0<44206> with status=12 opcode=0 len=0 vendor err 129
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2132 (most recent call first):
"""
WARNED = "gpu01:1:2 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to gpu02-ib0<41111> failed\n"
MPI_ABORT = "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD with errorcode 1.\n"
FOLLOWERS = {
    "shell_sigterm": {"code": 143},
    "sigterm": {"code": -15},
    "sigterm_of_agent": {"code": -15, "killed_by_us": True},
    "sigint": {"code": -2},
    "interrupt": raised("KeyboardInterrupt"),
    "sigpipe": {"code": -13},
    "silent": {"code": 1, "tail": "step 3\n"},
    "mpi_abort": {"code": 1, "tail": MPI_ABORT},
    "closed_stream": raised("EOFError"),
    "closed_pickle": raised("EOFError: Ran out of input"),
    "reset": raised("ConnectionResetError"),
    "torchrun": raised("torch.distributed.elastic.multiprocessing.api.SignalException: Process 3054 got signal: 15"),
    "store": raised("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: "
    "The connection to the C10d store "
                    "has failed. See inner exception for details."),
    "closed": raised("torch.distributed.elastic.rendezvous.api.RendezvousClosedError"),
    "left": raised("torch.distributed.elastic.rendezvous.api.RendezvousGracefulExitError"),
    "jax": {"code": -6, "tail": "F1124 10:00:00.000000 1 client.h:80] Terminating process because the JAX distributed "
            "service detected fatal errors. This most likely indicates that another task died.\n"},
}  # fmt: skip
"""How ranks end because a rank of another host has failed."""


def judged(*ranks, hosts=("gpu01", "gpu02"), addresses=None, end=None):
    """The result of an attempt with these ranks, an equal number on each host."""
    progress = AttemptProgress(len(ranks), hosts, address_book=AddressBook(hosts, addresses))
    places = [{"number": rank.number, "host": rank.host} for rank in progress.ranks]
    progress.ranks = [RankProgress(**place, **rank) for place, rank in zip(places, ranks, strict=True)]
    return classify(progress, TASK, end)


@pytest.mark.parametrize(
    ("ranks", "suspects", "began_on"),
    [
        # All ranks of one host failed by themselves, and no rank of another host did.
        ([KILLED, KILLED, NEW, NEW], ["gpu02"], ["gpu02"]),
        ([PEER_ERROR, KILLED, NEW, NEW], ["gpu02"], ["gpu02"]),
        # One rank of several is no proof that its host is at fault, nor are ranks on several hosts.
        ([KILLED, KILLED, KILLED, NEW], [], ["gpu02"]),
        ([NEW, PEER_ERROR, PEER_ERROR, PEER_ERROR], [], ["gpu01"]),
        ([NEW, KILLED, NEW, NEW], [], ["gpu01", "gpu02"]),
        ([NEW, NEW, NEW, NEW], [], ["gpu01", "gpu02"]),
        # What proves the fault of a node counts whatever other ranks do.
        ([NEW, NEW, KILLED, ECC], ["gpu02"], ["gpu02"]),
        # What passes by itself, or is too large for any node, says nothing about nodes.
        ([KILLED, KILLED, PORT, PORT], [], []),
        ([KILLED, KILLED, {"code": -9, "oom_killed": True}, {"code": -9, "oom_killed": True}], [], []),
        # Network errors: the one host that others name; no host where they name several, or none.
        ([closed_by("gpu02")] * 4, ["gpu02"], ["gpu02"]),
        ([closed_by("gpu02"), closed_by("gpu02"), closed_by("gpu01"), closed_by("gpu01")], [], []),
        ([PEER_ERROR] * 4, [], []),
        ([{"code": -6, "tail": WATCHDOG}] * 2 + [KILLED] * 2, ["gpu02"], ["gpu02"]),
        ([{"code": -6, "tail": f"[rank0]:{WATCHDOG}"}] * 2 + [KILLED] * 2, ["gpu02"], ["gpu02"]),
        ([{"code": 1, "tail": f"{WARNED}{TRACE}{NCCL.format('')}\n"}] * 2 + [KILLED] * 2, ["gpu02"], ["gpu02"]),
        # A warning with steps behind it was no failure.
        ([{"code": 1, "tail": f"{WARNED}step 3\n{TRACE}{NCCL.format('')}\n"}] * 2 + [KILLED] * 2, [], []),
        ([closed_by("10.0.0.2")] * 2 + [KILLED] * 2, [], []),
        # Few ranks that fail without a word: it began with them.
        ([PEER_ERROR, PEER_ERROR, PEER_ERROR, KILLED], [], ["gpu02"]),
    ],
)  # fmt: skip
def test_hosts_are_found_by_comparison(ranks, suspects, began_on):
    result = judged(*ranks)
    assert (list(result.suspect_hosts), list(result.began_on)) == (suspects, began_on), result.reason


@pytest.mark.parametrize("follower", FOLLOWERS.values(), ids=[*FOLLOWERS])
def test_ranks_that_only_follow_the_end_of_their_peers_do_not_count(follower):
    result = judged(follower, follower, NEW, NEW)
    assert (result.cause, result.suspect_hosts) == ("exception", ("gpu02",)), result.reason
    assert judged(follower, follower, follower, NEW).began_on == ("gpu02",)


@pytest.mark.parametrize("end", [{"code": 3, "tail": "validation failed\n"}, {"code": -9}, {"code": 1}])
def test_kills_and_exits_without_a_word_do_not_say_where_it_began(end):
    result = judged({"code": -15}, {"code": 143}, end, end)
    assert (result.suspect_hosts, result.began_on) == ((), ("gpu01", "gpu02")), result.reason
    assert judged(KILLED, KILLED, end, end).suspect_hosts == ("gpu02",)


@pytest.mark.parametrize(
    "name", ["RendezvousConnectionError: x", "RendezvousTimeoutError", "RendezvousClosedError"]
)
def test_a_rendezvous_that_fails_everywhere_is_an_error_of_communication(name):
    rank = raised(f"torch.distributed.elastic.rendezvous.api.{name}")
    result = judged(rank, rank, rank, rank)
    assert (result.status, result.suspect_hosts) == ("comm_error", ()), result.reason


@pytest.mark.parametrize("rank", [NEW, PEER_ERROR, closed_by("gpu01"), {"code": -7}, {"code": -9}, NO_GPU])
def test_in_a_run_of_one_node_nothing_can_be_compared(rank):
    result = judged(rank, rank, hosts=("gpu01",))
    assert (result.suspect_hosts, result.began_on) == ((), ("gpu01",))
    assert judged(ECC, ECC, hosts=("gpu01",)).suspect_hosts == ("gpu01",)


def test_a_gpu_that_cannot_be_used_is_a_node_failure_on_one_node_and_a_crash_on_all():
    assert judged(KILLED, KILLED, NO_GPU, NO_GPU).status == "node_fail"
    everywhere = judged(NO_GPU, NO_GPU, NO_GPU, NO_GPU)
    assert (everywhere.status, everywhere.cause, everywhere.suspect_hosts) == ("crash", "gpu_unavailable", ())


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("gpu02", "gpu02"), ("gpu02.cluster.example", "gpu02"), ("gpu02-ib0.cluster.example", "gpu02"),
        ("ib-gpu02", "gpu02"), ("GPU02", "gpu02"), ("10.1.0.2", "gpu02"), ("[10.1.0.2]:39851", "gpu02"),
        ("::ffff:10.1.0.2", "gpu02"), ("fe80::2%ib0", "gpu02"), ("login", "gpu02"), ("gpu1-2-ib", "gpu1-2"),
        # Addresses of nobody or of several hosts, and names of other hosts.
        ("10.9.9.9", None), ("172.17.0.1", None), ("gpu021", None), ("gpu1-3", None), ("127.0.0.1", None),
    ],
)  # fmt: skip
def test_peers_are_known_by_name_interface_or_address(peer, host):
    addresses = {"gpu02": ["10.1.0.2", "fe80::2", "172.17.0.1", "login"], "gpu1": ["172.17.0.1"]}
    hosts = ("gpu01", "gpu02", "gpu1", "gpu1-2")
    result = judged(closed_by(peer), KILLED, KILLED, KILLED, hosts=hosts, addresses=addresses)
    assert result.suspect_hosts == ((host,) if host else ())


def test_a_node_knows_its_own_addresses(tmp_path):
    fib = "Local:\n  |-- 10.1.0.2\n     /32 host LOCAL\n  |-- 127.0.0.1\n     /32 host LOCAL\n"
    files = {
        "proc/net/fib_trie": fib,
        "proc/net/if_inet6": "fe800000000000000000000000000002 02 40 20 80 ib0\n",
        "sys/class/infiniband/mlx5_0/ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0a01:0102\n",
        "etc/hosts": "127.0.0.1 localhost\n10.1.0.2 gpu02-ib # fabric\n10.1.0.3 gpu03-ib\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    addresses = set(addresses_of_host(tmp_path))
    assert {"gpu02-ib", "10.1.0.2", "fe80::2", "10.1.1.2"} <= addresses
    assert not {"127.0.0.1", "localhost", "gpu03-ib"} & addresses
    assert addresses_of_host(), "this machine has a name"


def test_a_hang_suspects_a_host_only_if_all_its_ranks_stand_still():
    def evidence(*states):
        ranks = [
            RankProgress(number=n, host=f"gpu0{n // 2 + 1}", evidence=NO_EVIDENCE | {"state": state})
            for n, state in enumerate(states)
        ]
        return evidence_of_ranks(find_hang_cause(ranks).culprits, ranks)

    assert evidence("S", "S", "T", "T") == (("gpu02",), ("gpu02",))
    assert evidence("S", "S", "S", "T") == ((), ("gpu02",))
    assert evidence("T", "S", "S", "T") == ((), ("gpu01", "gpu02"))
