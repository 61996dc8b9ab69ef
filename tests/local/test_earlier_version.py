"""A sweep that version 0.2.0 wrote and paused continues, and what it had measured stays."""

import json
import shutil
from collections import Counter
from pathlib import Path

FIXTURE = Path(__file__).parents[1] / "fixtures/v0.2.0"


def test_a_paused_sweep_of_version_0_2_0_continues(bench):
    shutil.copy(FIXTURE / "train.py", bench.folder)
    shutil.copytree(FIXTURE / "results/local", bench.folder / "results/t")
    before = {(r["run_id"], r["repeat"], r["attempt"]): r for r in bench.rows()}
    assert bench.status()["by_status"] == {"crash": 4, "ok": 2, "pending": 6}

    bench.run("sweep", "resume", "t", code=1)

    after = {(r["run_id"], r["repeat"], r["attempt"]): r for r in bench.rows()}
    names = set(json.loads((FIXTURE / "rows.json").read_text())["local"][0]) - {"is_final", "suspect"}
    assert {key: {n: after[key][n] for n in names} for key in before} == {
        key: {n: row[n] for n in names} for key, row in before.items()
    }
    assert bench.status()["by_status"] == {"crash": 8, "ok": 4}
    # Each segmentation fault is tried once more, also the two that the earlier version had left to be tried.
    attempts = Counter(run_id for run_id, _, _ in after)
    assert all(attempts[row["run_id"]] == 2 for row in after.values() if row["cause"] == "segfault")
    assert max(attempts.values()) == 2
