"""Which rank is the root, and at which hosts a failure points."""

import pytest

from tests.unit.test_outcome import HANG, PEER, TIMEOUT, failing, judged, killed, ok
from ultrabench.agent.lead import failure_of
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress

DONE = ok(done={"event": "done"})
HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
GONE = "the agent of node 2 (gpu03) is gone"
NAMES_A_PEER = (
    "DistBackendError: NCCL error\nLast error:\n{own}:17:42 [0] NCCL WARN closed by remote peer {peer}<44321>"
)


def naming(own, peer):
    return RankProgress(code=1, tail=NAMES_A_PEER.format(own=own, peer=peer))


@pytest.mark.parametrize(
    ("ranks", "words", "status", "cause", "suspects"),
    [
        ([PEER, PEER, killed(), PEER], {"lost": GONE}, "node_fail", "node_failure", ["gpu03"]),
        ([PEER, failing("oom", "MemoryError"), PEER, PEER], {"lost": GONE}, "oom", "cpu_oom", []),
        ([PEER, failing("exception", "E: x"), PEER, PEER], {"lost": GONE}, "node_fail", "node_failure", ["gpu03"]),
        ([PEER, RankProgress(code=-15), PEER, PEER], {"ended": "by SIGTERM"}, "cancelled", "stopped", []),
        ([PEER, RankProgress(code=-7), PEER, PEER], {}, "crash", "bus_error", ["gpu02"]),
        # Whom peers name, who alone says nothing, or who failed first.
        ([naming("gpu01", "gpu04"), PEER, PEER, PEER], {}, "comm_error", "nccl_error", ["gpu04"]),
        ([PEER, PEER, killed(), PEER], {}, "comm_error", "connection_error", ["gpu03"]),
        ([failing("comm", "late", failed_at=9.0), failing("comm", "first", failed_at=3.0)], {},
         "comm_error", "connection_error", ["gpu03"]),
        # Ended with 0 while others still needed it; who was done may end before the others fail.
        ([killed(), RankProgress(code=0), killed(), killed()], {"stopped": HANG}, "crash", "exited_early", []),
        ([PEER, RankProgress(code=0), PEER, PEER], {}, "crash", "exited_early", []),
        ([killed(), RankProgress(code=0), killed(), killed()], {"stopped": TIMEOUT}, "timeout", "time_limit", []),
        ([PEER, ok(done={"event": "done"}), PEER, PEER], {}, "comm_error", "connection_error", ["gpu01"]),
        ([RankProgress(code=3), RankProgress(code=0), PEER, PEER], {}, "crash", "exit_code", []),
        ([RankProgress(code=0), RankProgress(code=0), RankProgress(code=0), killed()], {"stopped": HANG}, "hang", "hang", []),
        # An exception that nobody caught counts also where the program hung in its end.
        ([killed(), killed(tail="Traceback (most recent call last):\n  File x\nKeyError: 'lr'\n")],
         {"stopped": HANG}, "crash", "exception", []),
        ([killed(), killed(tail="Traceback (most recent call last):\n  File x\nKeyError: 'lr'\n" + "on\n" * 9)],
         {"stopped": HANG}, "hang", "hang", []),
    ],
)  # fmt: skip
def test_causes_and_suspects(ranks, words, status, cause, suspects):
    found = judged(*ranks, hosts=HOSTS, **words)
    assert (found.status, found.cause, list(found.suspects)) == (status, cause, suspects), found.reason


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([killed(), RankProgress(code=1, tail="ImportError: no gloo\n"), killed()], "rank 1: ImportError: no gloo"),
        ([killed(), RankProgress(code=-9), killed()],
         "rank 1: killed by SIGKILL, which ultrabench did not send: (empty log)"),
        ([PEER, DONE, failing("oom", "MemoryError", failed_at=9.0)], "rank 2: MemoryError"),
        ([DONE, RankProgress(code=0, phase="join")], "rank 1: exited with code 0 in phase join while others went on"),
        ([DONE, killed(phase="join")], "rank 1 ended with code -9 in phase join: (empty log)"),
        ([DONE, DONE], None),
    ],
)  # fmt: skip
def test_a_preflight_tells_of_the_rank_that_failed_and_not_of_those_that_waited_for_it(ranks, told):
    progress = AttemptProgress(len(ranks))
    progress.ranks = ranks
    assert failure_of(progress) == told
