"""Every end of a run gets its own name, from evidence, and the sweep goes on; no process is left."""

import re

import pytest

pytestmark = pytest.mark.local

# One run a behaviour: mbs names it.
BEHAVIOURS = {
    1: "raise", 2: "kill", 4: "memory", 8: "nan", 16: "hang", 32: "stuck", 64: "fine", 128: "orphans",
}  # fmt: skip
EXPECTED = {
    "raise": ("crash", "planted error"), "kill": ("crash", "killed by SIGKILL"),
    "memory": ("oom", "MemoryError"), "nan": ("invalid", "loss is nan at step 5"),
    "hang": ("hang", "no progress"), "stuck": ("timeout", "still in phase train"), "fine": ("ok", None),
    "orphans": ("crash", "left an orphan"),
}  # fmt: skip


def test_statuses_retry_and_table(bench):
    gas = [256 // (2 * mbs) for mbs in BEHAVIOURS]
    behaviour = ",".join(f"{mbs}:{name}" for mbs, name in BEHAVIOURS.items())
    overrides = bench.overrides(
        behaviour, "sweep.nodes=1", "sweep.gbs=256", "sweep.seq_len=8", "sweep.zero_stage=0",
        f"sweep.mbs={list(BEHAVIOURS)}", f"sweep.gas={gas}", "measure.run_limit_s=4",
        "measure.race=null", "measure.start_deadline_s=600",
    )  # fmt: skip
    done = bench.done("sweep", "launch", *overrides)
    assert done.returncode == 1
    (shown,) = re.findall(r"^next: ultrabench sweep show (\w{16}) t shows why", done.stderr, re.MULTILINE)
    rows = bench.rows()
    assert shown in {r["run_id"] for r in rows if r["is_final"] and r["status"] not in ("ok", "oom")}
    last = {BEHAVIOURS[r["mbs"]]: r for r in rows if r["is_final"]}
    for behaviour, (status, text) in EXPECTED.items():
        row = last[behaviour]
        assert row["status"] == status, (behaviour, row["status"], row["reason"])
        assert text is None or text in row["reason"]
    attempts = {b: sum(BEHAVIOURS[r["mbs"]] == b for r in rows) for b in EXPECTED}
    assert attempts == {
        "raise": 1, "kill": 2, "memory": 2, "nan": 2, "hang": 3, "stuck": 2, "fine": 1, "orphans": 1
    }  # fmt: skip
    assert bench.status()["by_status"] == {
        "crash": 3, "hang": 1, "invalid": 1, "ok": 1, "oom": 1, "timeout": 1
    }  # fmt: skip

    before = bench.executions()
    dry = bench.run("sweep", "retry", "t", "--only", "crash", "--dry-run")
    assert dry.count("planted error") == 1
    assert bench.executions() == before
    bench.run("sweep", "retry", "t", "--only", "crash", code=1)
    old = {(r["run_id"], r["attempt"]) for r in rows}
    rows = bench.rows()
    again = [r for r in rows if (r["run_id"], r["attempt"]) not in old]
    assert sorted(BEHAVIOURS[r["mbs"]] for r in again) == ["kill", "orphans", "raise"]
    new = bench.executions()[len(before) :]
    assert sorted(new) == sorted(f"{r['run_id']} 0 {r['attempt']}" for r in again)
    raised = next(r for r in again if BEHAVIOURS[r["mbs"]] == "raise")
    shown = bench.run("sweep", "show", raised["run_id"])
    assert shown.count("crash") == 3, "in the head, and once for each attempt"
    assert sorted(bench.executions()) == sorted(f"{r['run_id']} {r['repeat']} {r['attempt']}" for r in rows)
