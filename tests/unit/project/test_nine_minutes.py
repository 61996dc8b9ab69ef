"""benchmarks/nine_minutes.py: its rows on CPUs, what a failure leaves, and which lines a call selects."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import nine_minutes
from ultrabench.errors import ConfigError

PROGRAM = Path(nine_minutes.__file__)


def run(out: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, rows and stderr of a call on CPUs."""
    command = [sys.executable, str(PROGRAM), "--cpu", "--out", str(out), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return ended.returncode, rows, ended.stderr


def test_a_line_writes_rows_with_what_they_were_measured_with(tmp_path: Path) -> None:
    code, rows, _ = run(tmp_path / "rows.jsonl", "--lines", "9", "--commit", "abc")
    assert code == 0
    assert [row["line"] for row in rows] == [9, 9, 9, 9]
    assert all(row["flops_per_s"] > 1e6 for row in rows[:3])
    assert {(row["commit"], row["hardware"], row["torch_version"] > "2") for row in rows} == {
        ("abc", "cpu", True)
    }
    assert "--lines 9" in rows[0]["command"]


def test_a_line_that_does_not_fit_the_time_is_named(tmp_path: Path) -> None:
    bench = nine_minutes.Bench("cpu", "cpu", tmp_path)
    rows = [*nine_minutes.measured_rows(bench, [1, 2, 3], time.monotonic() + 0.6)]
    assert [row["line"] for row in rows] == [1, 2, 3]
    assert all("do not fit" in row["skipped"] for row in rows)


@pytest.mark.parametrize(("words", "numbers"), [("1-3", [1, 2, 3]), ("12", [12]), ("2,4-5", [2, 4, 5])])
def test_lines_are_selected(words: str, numbers: list[int]) -> None:
    assert nine_minutes.selected_lines(words) == numbers


@pytest.mark.parametrize("words", ["0", "13", "1-x", ""])
def test_a_wrong_line_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="--lines"):
        nine_minutes.selected_lines(words)


def test_what_was_measured_before_a_failure_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_forked(functions: dict[str, Any], _: float) -> None:
        for function in functions.values():
            try:
                function()
            except RuntimeError as error:
                raise nine_minutes.ChildError(f"RuntimeError: {error}") from None

    def measure() -> Iterator[dict[str, Any]]:
        yield {"what": "first", "flops_per_s": 1.0}
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(nine_minutes, "run_forked", run_forked)
    rows = [*nine_minutes.forked(measure, "both", 1.0)]
    assert rows[0] == {"what": "first", "flops_per_s": 1.0}
    assert rows[1:] == [{"what": "both", "failed": "RuntimeError: CUDA out of memory"}]


@pytest.mark.campaign
def test_every_line_runs_on_cpus(tmp_path: Path) -> None:
    code, rows, stderr = run(tmp_path / "rows.jsonl", "--minutes", "60")
    assert code == 0, stderr[-2000:]
    assert {row["line"] for row in rows} == {*range(1, 13)}
    assert not [row for row in rows if "failed" in row]
