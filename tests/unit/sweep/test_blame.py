"""Who is to blame for failures, by the table of runs, nodes and outcomes: single tables,
and whole sweeps on a played cluster.
"""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import left, retry
from tests.unit.allocations import PLAN
from ultrabench.record import raw_json
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import AllocationEnded, Launched, Start
from ultrabench.store.state import AllocationState, AttemptState, SweepState
from ultrabench.sweep.running.blame import NodeRole, blame_of, trial_of
from ultrabench.sweep.running.outliers import suspect_attempts
from ultrabench.sweep.running.retry import decide_retry

POLICY = retry()


def ok(*hosts, **fields):
    return RunResult(status=Status.OK, hostnames=hosts, **fields)


def crash(*hosts, on=None, suspects=(), print_="f", status="crash", **fields):
    """A failure on `hosts` that began on the hosts `on`, by default on the only one."""
    began_on = hosts if on is None else on
    return RunResult(
        status=Status(status), hostnames=hosts, began_on=began_on, suspect_hosts=suspects, fingerprint=print_,
        reason="a text", cause="exception", **fields,
    )  # fmt: skip


def table(**results_by_run):
    """A state in which each run had these results, one after another; they began in the order of the runs."""
    state, begun = SweepState(), 0
    for run_id, results in results_by_run.items():
        for number, result in enumerate(results):
            begun += 1
            key = AttemptKey(run_id, 0, number)
            spec = raw_json({"layout": {"pp": 1}})
            state.attempts[key] = AttemptState(key=key, result=result, time=float(begun), spec_json=spec)
    return state


def excluded(policy=POLICY, **results_by_run):
    return [*blame_of(table(**results_by_run), policy).excluded]


def decided(run_id="a", **results_by_run):
    """What follows from the failures of a run in a table."""
    state = table(**results_by_run)
    attempts = state.by_run()[run_id]
    return decide_retry(attempts, POLICY, blame=blame_of(state, POLICY))


BAD, FINE = crash("bad"), ok("x")
PAIR = crash("bad", "x", on=("bad",))
SUSPECT = crash("bad", "x", on=("bad",), suspects=("bad",))


@pytest.mark.parametrize(
    ("runs", "nodes"),
    [
        # Two runs that failed on a node and were ok without it.
        ({"a": [BAD, FINE], "b": [BAD, FINE]}, ["bad"]),
        ({"a": [PAIR, ok("x", "y")], "b": [PAIR, ok("y", "z")]}, ["bad"]),
        ({"a": [BAD, FINE]}, []),
        ({"a": [BAD], "b": [BAD]}, []),  # nothing says that they are ok elsewhere
        ({"a": [BAD, FINE], "b": [BAD, crash("x")]}, []),  # b fails in the same way elsewhere
        # Two runs of which each suspects the node, unless they suspect others for the same failure.
        ({"a": [SUSPECT], "b": [SUSPECT], "c": [ok("y", "z")]}, ["bad"]),
        ({"a": [SUSPECT], "b": [SUSPECT]}, []),  # nothing is ok without it, so that nothing can be compared
        ({"a": [SUSPECT] * 3, "c": [ok("y", "z")]}, []),
        ({"a": [crash("p", "q", on=("p",), suspects=("p",)), crash("r", "s", on=("r",), suspects=("r",))],
          "b": [crash("p", "q", on=("p",), suspects=("p",), print_="g")]}, []),
        # Proof counts at once; a failure in a run of one node is no proof.
        ({"a": [crash("ecc", status="node_fail", suspects=("ecc",))]}, ["ecc"]),
        ({"a": [replace(crash("p", status="node_fail", suspects=("p",)), cause="agent_gone")] * 2}, []),
        # A flaky program fails now and then on any node, also on one twice.
        ({"a": [crash("p"), ok("q")], "b": [crash("q"), ok("r")], "c": [crash("r"), ok("p")],
            "d": [crash("p"), ok("r")],
          "e": [ok("p")], "f": [ok("q")], "g": [ok("r")]}, []),
        # A node that was fine and then broke; one that failed twice among many runs since.
        ({**{f"o{n}": [ok("bad")] for n in range(8)}, "x": [BAD, FINE], "y": [BAD, FINE]}, []),
        ({**{f"o{n}": [ok("bad")] for n in range(8)}, "x": [BAD, FINE], "y": [BAD, FINE], "z": [BAD, FINE]}, ["bad"]),
        # Runs that fail elsewhere in the same way, whether or not they are ok somewhere, tell of the program.
        ({"a": [crash("p", "q", on=("p",)), crash("q", "r", on=("q",))],
            "b": [crash("p", "q", on=("p",)), crash("q", "r", on=("q",))],
          "c": [crash("p", "q", on=("p",)), ok("q", "r")], "d": [crash("p", "q", on=("p",)), ok("q", "r")]}, []),
        # The same failure elsewhere clears a node also where nobody knows on which node it began.
        ({run: [replace(SUSPECT, status=Status.COMM_ERROR), replace(crash("y", "z", on=()), status=Status.COMM_ERROR)]
          for run in "ab"} | {"c": [ok("y", "z")]}, []),
        ({run: [SUSPECT, crash("y", "z")] for run in "ab"} | {"c": [ok("y", "z")]}, []),
        ({"x": [BAD, FINE], "y": [BAD, FINE], **{f"z{n}": [ok("bad")] for n in range(8)}}, []),
        # What is computed wrongly, takes too long, needs more memory or passes by itself is no node's fault.
        ({"a": [replace(BAD, status=Status.INVALID), FINE], "b": [replace(BAD, status=Status.INVALID), FINE]}, []),
        ({"a": [replace(BAD, status=Status.TIMEOUT), FINE], "b": [replace(BAD, status=Status.TIMEOUT), FINE]}, []),
        ({"a": [replace(BAD, cause="port_taken"), FINE], "b": [replace(BAD, cause="port_taken"), FINE]}, []),
        ({"a": [replace(BAD, status=Status.OOM, confirmed=True), FINE],
          "b": [replace(BAD, status=Status.OOM, confirmed=True), FINE]}, []),
        # Two nodes are bad: what seemed to be the program's is theirs, once nothing else works on them.
        ({"a": [crash("p"), crash("q")], "b": [crash("p"), ok("r")], "c": [crash("p"), ok("s")],
          "d": [crash("q"), ok("r")], "e": [crash("q"), ok("s")]}, ["p", "q"]),
    ],
)  # fmt: skip
def test_which_nodes_are_excluded(runs, nodes):
    assert excluded(**runs) == nodes


def test_a_role_that_fails_on_any_node_is_the_program():
    """Rank 0 is flaky, and sits on the first of the names each time."""
    first = {
        name: [crash("gpu1", other, on=("gpu1",)), ok(other, "gpu9")]
        for name, other in zip("ab", "xy", strict=True)
    }
    assert excluded(**first) == ["gpu1"], "so far only this node has failed in this role"
    later = {"c": [crash("gpu2", "x", on=("gpu2",)), ok("x", "y")]}
    assert excluded(**first, **later) == []


def test_the_role_of_a_node_follows_from_the_layout():
    key = AttemptKey("a", 0, 0)
    hosts = ("p", "q", "r", "s")
    two_stages = AttemptState(key=key, result=ok(*hosts), spec_json=raw_json({"layout": {"pp": 2}}))
    roles = [trial_of(two_stages).role_of(host) for host in hosts]
    assert roles == [
        NodeRole(True, True, False),
        NodeRole(False, True, False),
        *[NodeRole(False, False, True)] * 2,
    ]
    wide = AttemptState(key=key, result=ok(*hosts), spec_json=raw_json({"layout": {"pp": 8}}))
    assert [trial_of(wide).role_of(host)[1:] for host in hosts] == [
        (True, False),
        *[(False, False)] * 2,
        (False, True),
    ]
    assert trial_of(AttemptState(key=key, result=ok("p"))).role_of("p") == NodeRole(True, True, True)


def test_forgiven_nodes_and_a_limit_of_their_number():
    bad = {f"{node}{n}": [crash(node), FINE] for node in "pqr" for n in range(2)}
    assert excluded(**bad) == ["p", "q", "r"]
    assert excluded(retry(forgive=("p",)), **bad) == ["q", "r"]
    assert excluded(retry(max_excluded=1), **bad) == ["p"]


def test_on_this_machine_no_node_is_excluded():
    state = table(a=[BAD, FINE], b=[BAD, FINE])
    state.launched = Launched(generation=1, config={"launcher": {"name": "local"}})
    blame = blame_of(state, POLICY)
    assert (blame.excluded, blame.start_failures) == ({}, {})


def test_a_reason_says_which_row_of_the_table_it_is():
    reason = blame_of(table(aa=[BAD, FINE], bb=[BAD, FINE], c=[ok("y")]), POLICY).excluded["bad"]
    row = "2 runs failed there (aa, bb), 0 attempts ok there since; elsewhere 0 runs failed, 3 attempts ok"
    assert reason == row


@pytest.mark.parametrize(
    ("runs", "retried", "avoided"),
    [
        # Tried once on other nodes, whatever the status says.
        ({"a": [BAD]}, True, {"bad"}),
        ({"a": [PAIR]}, True, {"bad"}),
        ({"a": [BAD, crash("x")], "b": [ok("x")]}, False, set()),
        ({"a": [BAD, crash("x", print_="g")], "b": [ok("x")]}, False, set()),
        # Where nothing worked on either node yet, a third one tells more.
        ({"a": [BAD, crash("x")]}, True, {"bad", "x"}),
        ({"a": [BAD, crash("x"), crash("y")]}, False, set()),
        # A failure that came on disjoint nodes once is not tried elsewhere again, unless it comes and goes.
        ({"a": [BAD], "b": [crash("p"), crash("q")], "c": [ok("p")]}, False, set()),
        ({"a": [BAD], "b": [crash("p"), crash("q"), crash("r")]}, False, set()),
        ({"a": [BAD], "b": [crash("p"), crash("q")], "c": [crash("p"), ok("q")]}, True, {"bad"}),
        # Runs failed on all nodes before any was ok; if one is ok later, nodes may be bad after all.
        ({"a": [BAD], "b": [crash("p")], "c": [crash("q")]}, False, set()),
        ({"a": [BAD], "b": [crash("p")], "c": [crash("q")], "d": [ok("r")]}, True, {"bad"}),
        # On all nodes alike: nothing else to try.
        ({"a": [crash("x", "y")]}, False, set()),
        ({"a": [replace(crash("x", "y"), status=Status.COMM_ERROR)]}, True, set()),
        # No other nodes: once more on the same ones, and then for no other run.
        ({"a": [BAD, BAD]}, False, set()),
        ({"a": [BAD], "b": [BAD, BAD]}, False, set()),
        # A failure on a node that is excluded by now does not count against the run.
        ({"a": [BAD, replace(BAD, hostnames=("bad",))], "b": [BAD, FINE], "c": [BAD, FINE]}, True, {"bad"}),
        # Confirmed lack of memory is an answer.
        ({"a": [replace(BAD, status=Status.OOM, confirmed=True)]}, False, set()),
    ],
)  # fmt: skip
def test_where_a_run_is_tried_next(runs, retried, avoided):
    decision = decided(**runs)
    assert (decision.retry, set(decision.avoid)) == (retried, avoided), decision.why


def test_two_bad_nodes_do_not_make_the_program_guilty():
    """Both fail a run in the same way; other runs fail on each of them, nothing works there, and others work."""
    runs = {
        "a": [crash("p"), crash("q")],
        "b": [crash("p")],
        "c": [crash("q")],
        "d": [ok("r")],
        "e": [ok("s")],
    }
    assert decided("b", **runs).retry
    assert not decided("b", **{**runs, "f": [ok("p")]}).retry


# A start that failed


def started(state, name, number, failed_on=(), hosts=()):
    """Adds an allocation that ended; with `hosts` it ran something there."""
    end = AllocationEnded(allocation=name, reason="job 7 failed", failed_on=failed_on)
    state.allocations[name] = AllocationState(
        name=name, submission=("launch", number), submitting_at=float(number), ends={Start(): end}
    )
    if hosts:
        key = AttemptKey(name, 0, 0)
        state.attempts[key] = AttemptState(key=key, result=ok(*hosts), time=float(number), allocation=name)


def test_jobs_use_other_nodes_first_after_one_start_that_failed():
    state = SweepState()
    started(state, "x", 1, failed_on=("bad",))
    blame = blame_of(state, POLICY)
    assert (blame.excluded, blame.start_failures) == ({}, {"bad": "nothing started there: job 7 failed"})
    started(state, "y", 2, hosts=("bad",))
    assert blame_of(state, POLICY).start_failures == {}, "a later job has started there"
    assert blame_of(state, retry(forgive=("bad",))).start_failures == {}


def preflight(state, name, *digest_by_host):
    """Adds an allocation of one-GPU nodes whose GPUs computed these results in its preflight."""
    facts = [
        {"host": f"n{number}", "digests": [{"setup": "H100", "parts": {"bf16 products": digest}}]}
        for number, digest in enumerate(digest_by_host)
    ]
    state.allocations[name] = AllocationState(
        name=name, preflight={"nodes": facts}, preflight_at=float(len(name))
    )


def test_a_gpu_that_computes_other_bits_is_used_last_and_excluded_when_a_second_preflight_agrees():
    state = SweepState()
    preflight(state, "x", "5e1f", "5e1e", "5e1f")
    blame = blame_of(state, POLICY)
    reason = "device 0 computed bf16 products differently from 2 of 3 equal devices in 1 preflight"
    assert (blame.excluded, blame.differing) == ({}, {"n1": reason})
    assert blame.node_lines == {"n1": f"node n1 is used last: {reason}"}
    key = AttemptKey("a", 0, 0)
    state.attempts[key] = AttemptState(key=key, result=ok("n0", "n1", "n2"), allocation="x")
    (doubt,) = suspect_attempts(state, device="cuda")[key]
    assert (doubt.code, doubt.sentence.startswith("n1: device 0 computed bf16 products")) == (
        "differing_gpu",
        True,
    )
    preflight(state, "xx", "5e1f", "5e1e", "5e1f")
    blame = blame_of(state, POLICY)
    assert ([*blame.excluded], blame.differing) == (["n1"], {})
    assert blame.excluded["n1"] == reason.replace("1 preflight", "2 preflights")
    forgiving = blame_of(state, retry(forgive=("n1",)))
    assert (forgiving.excluded, forgiving.differing) == ({}, {})


# Whole sweeps on a played cluster


@dataclass
class Cluster:
    """Nodes that run one job each; jobs get free nodes in the order of their names, as on an idle cluster."""

    nodes: list[str]
    failing: dict[str, str] = field(default_factory=dict)
    """Node -> the text with which everything fails there."""
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def hosts(self, num_nodes, banned, busy):
        free = [node for node in self.nodes if node not in {*banned, *busy}]
        if len(free) < num_nodes:  # such an exclusion is never sent
            free = [node for node in self.nodes if node not in busy]
        return tuple(free[:num_nodes])


@dataclass
class Sweep:
    """A sweep on a played cluster."""

    cluster: Cluster
    num_nodes: int = 1
    num_jobs: int = 2
    runs: tuple = PLAN.runs[:8]
    crashing: frozenset = frozenset()
    """run_ids that fail everywhere."""
    flaky: float = 0.0
    """Probability with which any attempt fails at one of its nodes."""
    word: str = "a text"
    policy: object = POLICY
    state: SweepState = field(default_factory=SweepState)
    ever_excluded: dict = field(default_factory=dict)
    """Node -> what the runs that had failed on it when it was excluded."""

    def run(self):
        """Runs to the end; returns run_id -> the status that it ended with."""
        clock = 0.0
        while todo := left(self.runs, self.state, policy=self.policy).todo:
            blame, busy = blame_of(self.state, self.policy), set()
            for attempt in todo[: self.num_jobs]:
                clock += 1.0
                banned = {*blame.excluded, *blame.start_failures, *attempt.avoid}
                hosts = self.cluster.hosts(self.num_nodes, banned, busy)
                busy |= {*hosts}
                spec = raw_json({"nodes": self.num_nodes, "layout": {"pp": 1}})
                self.state.attempts[attempt.key] = AttemptState(
                    key=attempt.key, result=self._result(attempt.key, hosts), time=clock, spec_json=spec
                )
            for node in blame_of(self.state, self.policy).excluded:
                self.ever_excluded.setdefault(node, self._runs_failed_on(node))
            assert clock < 400, "it does not end"
        return {r.run_id: [*self.state.by_run()[r.run_id]][-1].result.status for r in self.runs}

    def _runs_failed_on(self, node):
        return {k.run_id for k, a in self.state.attempts.items() if not a.ok and node in a.result.began_on}

    def _result(self, key, hosts):
        chance = self.cluster.chance
        if key.run_id in self.crashing:
            return crash(*hosts, print_=f"{self.word} everywhere")
        if bad := tuple(host for host in hosts if host in self.cluster.failing):
            suspects = bad if len(bad) == 1 < len(hosts) else ()
            print_ = f"{self.word} {self.cluster.failing[bad[0]]}"
            return crash(*hosts, on=bad, suspects=suspects, print_=print_)
        if chance.random() < self.flaky:
            return crash(*hosts, on=(chance.choice(hosts),), print_=f"{self.word} flaky")
        return ok(*hosts, step_times_s=(1.0,) * 6)


NAMES = [f"gpu{n:02}" for n in range(1, 9)]


@settings(max_examples=40, deadline=None)
@given(
    bad=st.sampled_from(NAMES), word=st.text(max_size=8), num_nodes=st.sampled_from([1, 2, 3]),
    num_jobs=st.integers(1, 2),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_crash_on_one_node_only_ends_ok_elsewhere_and_the_node_is_named_after_two_runs(
    bad, word, num_nodes, num_jobs, order
):
    names = NAMES.copy()
    order.shuffle(names)
    sweep = Sweep(Cluster(names, {bad: "e"}), num_nodes=num_nodes, num_jobs=num_jobs, word=word)
    assert {*sweep.run().values()} == {Status.OK}
    used = {key.run_id for key, a in sweep.state.attempts.items() if bad in a.result.hostnames}
    assert [*sweep.ever_excluded] == ([bad] if len(used) >= 2 else [])
    assert all(2 <= len(runs) <= 2 + num_jobs for runs in sweep.ever_excluded.values())


@settings(max_examples=25, deadline=None)
@given(word=st.text(max_size=8), num_nodes=st.sampled_from([1, 2]), num_crashing=st.integers(1, 8))
def test_a_crash_everywhere_blames_nobody_and_is_soon_tried_elsewhere_no_more(word, num_nodes, num_crashing):
    crashing = frozenset(run.run_id for run in PLAN.runs[:num_crashing])
    sweep = Sweep(Cluster(NAMES), num_nodes=num_nodes, crashing=crashing, word=word)
    ends = sweep.run()
    assert {run_id for run_id, status in ends.items() if status != Status.OK} == crashing
    assert sweep.ever_excluded == {}
    # Each of the jobs that run at the same time may try it on other nodes, twice as long as nothing was ok.
    assert len(sweep.state.attempts) <= 8 + (2 * sweep.num_jobs if num_nodes == 1 else 0)


@pytest.mark.parametrize("second", ["e", "another text"])
@pytest.mark.parametrize("num_jobs", [1, 2, 3])
def test_two_bad_nodes_are_both_found_and_no_run_is_lost(second, num_jobs):
    """They fail at once, so that they are always free and get each new job."""
    cluster = Cluster(NAMES, {"gpu01": "e", "gpu02": second})
    sweep = Sweep(cluster, num_jobs=num_jobs, runs=PLAN.runs[:20])
    ends = sweep.run()
    assert {"gpu01", "gpu02"} == {*sweep.ever_excluded}
    assert [status for status in ends.values() if status != Status.OK] == []


@pytest.mark.parametrize("num_jobs", [1, 8])
@pytest.mark.parametrize(("flaky", "max_share"), [(0.03, 0.05), (0.1, 0.1)])
def test_flaky_programs_exclude_hardly_any_node(num_jobs, flaky, max_share):
    """The share of sweeps of 40 runs in which some node is ever excluded; alone, all runs begin on the same node."""
    num_sweeps, num_with_exclusions = 60, 0
    for seed in range(num_sweeps):
        cluster = Cluster(NAMES, chance=random.Random(seed))
        sweep = Sweep(cluster, num_jobs=num_jobs, runs=PLAN.runs[:40], flaky=flaky)
        sweep.run()
        num_with_exclusions += bool(sweep.ever_excluded)
    assert num_with_exclusions <= num_sweeps * max_share


def test_a_run_that_needs_all_nodes_is_tried_once_more_and_excludes_none():
    """Of 8 nodes: it fails on one of them, always, and no run can do without it."""
    sweep = Sweep(Cluster(NAMES, {"gpu08": "e"}), num_nodes=8, num_jobs=1, runs=PLAN.runs[:6])
    assert {*sweep.run().values()} == {Status.CRASH}
    assert sweep.ever_excluded == {}
    assert len(sweep.state.attempts) <= 6 + 2


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_other_words_and_other_host_names_change_no_decision_without_proof(data):
    """Texts become random words, and hosts change their names; what is decided is the same with the new names."""
    hosts = data.draw(st.permutations(NAMES))
    rename = dict(zip(NAMES, hosts, strict=True))
    word = data.draw(st.text(alphabet="abcdef0123456789", min_size=4, max_size=8))
    draws = st.tuples(
        st.sampled_from("abcd"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
        st.sampled_from(["ok", "crash", "hang", "comm_error"]), st.integers(0, 2), st.booleans(),
    )  # fmt: skip
    trials = data.draw(st.lists(draws, max_size=14))

    def state(renamed, words):
        results = {run: [] for run in "abcd"}
        for run, names, status, began, is_suspect in trials:
            names = tuple(renamed[name] for name in names)
            on = names[: began + 1] if began < len(names) else ()
            end = crash(*names, on=on, suspects=on if is_suspect else (), print_=words[began], status=status)
            results[run].append(ok(*names) if status == "ok" else replace(end, reason=words[began]))
        return table(**results)

    def decisions(state):
        blame = blame_of(state, POLICY)
        runs = {}
        for run, attempts in state.by_run().items():
            if not attempts[-1].ok:
                decision = decide_retry(attempts, POLICY, blame=blame)
                runs[run] = decision.retry, decision.avoid
        return {*blame.excluded}, len(blame.program_failures), runs

    plain = decisions(state({name: name for name in NAMES}, ("f", "g", "h")))
    other = decisions(state(rename, tuple(f"{word}{n}" for n in range(3))))
    nodes, num_failures, runs = plain
    renamed_runs = {
        r: (is_retried, tuple(sorted(rename[n] for n in avoid))) for r, (is_retried, avoid) in runs.items()
    }
    assert other == ({rename[node] for node in nodes}, num_failures, renamed_runs)
    for node in nodes:
        assert len({t[0] for t in trials if node in t[1]}) >= 2, (
            "without proof no node is excluded on one run"
        )
