"""Every end of a run gets its own name, from evidence, and the sweep goes on; no process is left."""

import re
from collections import Counter

import pytest

pytestmark = pytest.mark.local

# One run a behaviour, mbs names it: its status, what its reason says, and how often it is tried.
EXPECTED = {
    # This machine has no other node, so each crash is tried once more on it.
    "raise": ("crash", "planted error", 2), "kill": ("crash", "killed by SIGKILL", 2),
    "memory": ("oom", "MemoryError", 2), "nan": ("invalid", "loss is nan at step 5", 2),
    "hang": ("hang", "no progress", 3), "stuck": ("timeout", "still in phase train", 2), "fine": ("ok", "", 1),
    "orphans": ("crash", "left an orphan", 2), "huge": ("invalid", "rank 1 reported step seconds=1e+308: not a n", 2),
    "fields": ("ok", "", 1),
}  # fmt: skip


BEHAVIOURS = {2**n: name for n, name in enumerate(EXPECTED)}


def test_statuses_retry_and_table(bench):
    behaviours = ",".join(f"{mbs}:{name}" for mbs, name in BEHAVIOURS.items())
    limits = ("measure.run_limit_s=4", "measure.race=null", "measure.start_deadline_s=600")
    process = bench.done(*bench.launch(behaviours, *limits, gbs=1024, seq_len=8, mbs=[*BEHAVIOURS]))
    assert process.returncode == 1
    (shown,) = re.findall(r"^next: ultrabench sweep show (\w{16}) t shows why", process.stderr, re.MULTILINE)
    rows = bench.rows()
    last = {BEHAVIOURS[r["mbs"]]: r for r in rows if r["is_final"]}
    assert shown in {r["run_id"] for r in last.values() if r["status"] not in ("ok", "oom")}
    tries = Counter(BEHAVIOURS[r["mbs"]] for r in rows)
    assert {name: (last[name]["status"], tries[name]) for name in EXPECTED} == {
        name: (status, number) for name, (status, _, number) in EXPECTED.items()
    }
    assert [n for n, (_, text, _) in EXPECTED.items() if text not in (last[n]["reason"] or "")] == []
    assert not last["huge"]["suspect_hosts"], "nonsense blames no node"
    assert bench.status()["by_status"] == Counter(status for status, _, _ in EXPECTED.values())

    before = bench.executions()
    dry = bench.run("sweep", "retry", "t", "--only", "crash", "--dry-run")
    assert dry.count("planted error") == 1
    assert bench.executions() == before
    bench.run("sweep", "retry", "t", "--only", "crash", code=1)
    old = {(r["run_id"], r["attempt"]) for r in rows}
    rows = bench.rows()
    retried = {BEHAVIOURS[r["mbs"]]: r for r in rows if (r["run_id"], r["attempt"]) not in old}
    assert sorted(retried) == ["kill", "orphans", "raise"]
    new = bench.executions()[len(before) :]
    assert sorted(new) == sorted(f"{r['run_id']} 0 {r['attempt']}" for r in retried.values())
    shown = bench.run("sweep", "show", retried["raise"]["run_id"])
    assert shown.count("crash") == 4, "in the head, and once for each attempt"
    assert sorted(bench.executions()) == sorted(f"{r['run_id']} {r['repeat']} {r['attempt']}" for r in rows)
