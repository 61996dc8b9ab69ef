"""Every end of a run gets its own name, from evidence, and the sweep goes on; no process is left."""

import re
from collections import Counter

import pytest

pytestmark = pytest.mark.local

# One run a behaviour, mbs names it: its status, what its reason says, and how often it is tried.
EXPECTED = {
    "raise": ("crash", "planted error", 1), "kill": ("crash", "killed by SIGKILL", 2),
    "memory": ("oom", "MemoryError", 2), "nan": ("invalid", "loss is nan at step 5", 2),
    "hang": ("hang", "no progress", 3), "stuck": ("timeout", "still in phase train", 2), "fine": ("ok", "", 1),
    "orphans": ("crash", "left an orphan", 1),
}  # fmt: skip


def behaviours(names):
    """Name of each behaviour by its micro-batch size, and these as a word of the program."""
    sizes = {2**n: name for n, name in enumerate(names)}
    return sizes, ",".join(f"{mbs}:{name}" for mbs, name in sizes.items())


def test_statuses_retry_and_table(bench):
    sizes, word = behaviours(EXPECTED)
    limits = ("measure.run_limit_s=4", "measure.race=null", "measure.start_deadline_s=600")
    done = bench.done(*bench.launch(word, *limits, gbs=256, seq_len=8, mbs=[*sizes]))
    assert done.returncode == 1
    (shown,) = re.findall(r"^next: ultrabench sweep show (\w{16}) t shows why", done.stderr, re.MULTILINE)
    rows = bench.rows()
    last = {sizes[r["mbs"]]: r for r in rows if r["is_final"]}
    assert shown in {r["run_id"] for r in last.values() if r["status"] not in ("ok", "oom")}
    tries = Counter(sizes[r["mbs"]] for r in rows)
    assert {name: (last[name]["status"], tries[name]) for name in EXPECTED} == {
        name: (status, number) for name, (status, _, number) in EXPECTED.items()
    }
    assert [n for n, (_, text, _) in EXPECTED.items() if text not in (last[n]["reason"] or "")] == []
    assert bench.status()["by_status"] == Counter(status for status, _, _ in EXPECTED.values())

    before = bench.executions()
    dry = bench.run("sweep", "retry", "t", "--only", "crash", "--dry-run")
    assert dry.count("planted error") == 1
    assert bench.executions() == before
    bench.run("sweep", "retry", "t", "--only", "crash", code=1)
    old = {(r["run_id"], r["attempt"]) for r in rows}
    rows = bench.rows()
    again = {sizes[r["mbs"]]: r for r in rows if (r["run_id"], r["attempt"]) not in old}
    assert sorted(again) == ["kill", "orphans", "raise"]
    new = bench.executions()[len(before) :]
    assert sorted(new) == sorted(f"{r['run_id']} 0 {r['attempt']}" for r in again.values())
    shown = bench.run("sweep", "show", again["raise"]["run_id"])
    assert shown.count("crash") == 3, "in the head, and once for each attempt"
    assert sorted(bench.executions()) == sorted(f"{r['run_id']} {r['repeat']} {r['attempt']}" for r in rows)


NONSENSE = {
    "huge": "step seconds=1e+308: not a number of seconds", "digits": f"step seconds={'7' * 60}: not a number of seconds",
    "deep": "a line that cannot be read: ", "fields": None, "fine": None,
}  # fmt: skip


def test_nonsense_costs_its_own_run_only(bench):
    """What ranks report on the leading and on a following node cannot hurt an agent, nor blame a node."""
    sizes, word = behaviours(NONSENSE)
    policy = ("measure.race=null", "retry.attempts.invalid=0", "measure.confirm=1")
    bench.run(*bench.launch(word, *policy, nodes=[1, 2], gbs=64, seq_len=8, mbs=[*sizes]), code=1)
    rows = bench.rows()
    for row in rows:
        reason, last = NONSENSE[sizes[row["mbs"]]], 2 * row["nodes"] - 1
        if reason is None:
            assert row["status"] == "ok", row["reason"]
        else:
            assert (row["status"], row["cause"], row["suspect_hosts"]) == ("invalid", "bad_report", [])
            assert row["reason"].startswith(f"rank {last} reported {reason}")
    assert len({row["allocation"] for row in rows}) == 2
    assert len(bench.executions()) == len(rows) == 2 * len(NONSENSE)
