"""`ultrabench sweep show` and `logs`: everything about one run."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.text import Text

from ultrabench.analysis.collect import collect
from ultrabench.analysis.ranking import leaderboard
from ultrabench.analysis.rows import Row
from ultrabench.cli.sweep.profile import print_profile, profiles
from ultrabench.cli.sweep.top import numbers
from ultrabench.cli.tables import out, plain, print_json, say, style_of, table, warn
from ultrabench.errors import SweepFolderError, counted
from ultrabench.record import to_dict
from ultrabench.result import SLOWER
from ultrabench.store.folder import SweepFolder, find_sweep
from ultrabench.store.journal import JournalReader
from ultrabench.store.state import AttemptState, Fold, SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.plan_table import read_rows
from ultrabench.sweep.running.losses import with_loss_outliers

FOLLOW_S = 0.3
MOST_RANK_DIGITS = 5
"""A number of more digits is the beginning of a run id, never a rank."""
HANG_COLUMNS = ("rank", "host", "state", "phase", "step", "part", "microbatches", "collective", "at")


def show_run(given: str, sweep: str | None, as_json: bool, results: Path) -> None:
    """Prints spec, prediction, attempts and evidence of one run."""
    folder, run_id, look = _find(given, sweep, results)
    attempts = look().attempts_of(run_id)
    row = next((r for r in read_rows(folder.plan) if r["run_id"] == run_id), None)
    document: dict[str, Any] = {
        "sweep": folder.name,
        "run_id": run_id,
        "plan": row,
        "spec": next((a.spec for a in attempts if a.spec), None),
        "attempts": [_attempt(folder, a) for a in attempts],
    }
    if as_json:
        print_json(document)
        return
    console = out()
    shown = {k: v for k, v in (row or {}).items() if v is not None}
    console.print(f"run {run_id} of {folder.name}", style="bold")
    _print_numbers(folder, run_id)
    console.print(yaml.safe_dump(shown, sort_keys=False).rstrip())
    made = table("\nattempts", "repeat", "attempt", "status", "step s", "loss", "seconds", "on", "reason")
    for a in attempts:
        made.add_row(*_columns(a))
    console.print(made)
    for a in attempts:
        if a.result and a.result.evidence:
            console.print(f"\nevidence of {a.key.repeat}.{a.key.attempt}", style="bold")
            _print_evidence(a.result.evidence, folder.log_folder(*a.key))
        for seen in profiles(folder.log_folder(*a.key)):
            print_profile(seen)


def _print_numbers(folder: SweepFolder, run_id: str) -> None:
    """The line of `sweep top` of this run, one number below the other; nothing of a run that trains nothing."""
    for row in (row for row in _runs(folder) if row["run_id"] == run_id):
        cell = f"{row['model']} on {counted(row['nodes'], 'node')}"
        shown = {"rank": f"{row['rank']}, {cell}"} | numbers(row) | {"in doubt": row["suspect"]}
        for name, value in shown.items():
            if str(value or ""):
                out().print(Text(f"{name:<14}").append(value if isinstance(value, Text) else str(value)))


def _runs(folder: SweepFolder) -> list[Row]:
    """The runs of a sweep by their rank in `sweep top`; none of a sweep that only measures links."""
    return [row for runs in leaderboard(collect([folder], lambda note: None)) for row in runs]


def _print_evidence(evidence: dict[str, Any], logs: Path) -> None:
    """Prints how the ranks ended; for a hang also its cause and what every rank was doing."""
    console = out()
    for rank in evidence.get("ranks", []):
        console.print(_rank_line(rank), soft_wrap=True)
    if "hang_cause" in evidence:
        console.print(f"\n{evidence['hang_cause']}\n", soft_wrap=True)
    rows = evidence.get("hang_evidence", [])
    if rows:
        made = table("before the ranks were killed", *HANG_COLUMNS)
        for row in rows:
            made.add_row(*("" if row.get(name) is None else str(row[name]) for name in HANG_COLUMNS))
        console.print(made)
    for path in sorted((logs / "hang_evidence").glob("*")):
        console.print(str(path), soft_wrap=True)
    console.print(f"logs: {logs}{'' if logs.is_dir() else ' (gone)'}", soft_wrap=True)


def _attempt(folder: SweepFolder, attempt: AttemptState) -> dict[str, Any]:
    return {
        "repeat": attempt.key.repeat,
        "attempt": attempt.key.attempt,
        "allocation": attempt.allocation,
        "phase": attempt.phase,
        "result": to_dict(attempt.result) if attempt.result else None,
        "logs": str(folder.log_folder(*attempt.key)),
        "profile": profiles(folder.log_folder(*attempt.key)),
    }


def _columns(attempt: AttemptState) -> list[str | Text]:
    key, result = attempt.key, attempt.result
    if result is None:
        return [str(key.repeat), str(key.attempt), f"running: {attempt.phase}", "", "", "", "", ""]
    step = f"{median(result.step_times_s):.4g}" if result.step_times_s else ""
    loss = "" if result.loss_final is None else f"{result.loss_final:.6f}"
    took = "" if result.duration_s is None else f"{result.duration_s:.1f}"
    hosts = ",".join(result.hostnames)
    status = result.status.value
    ended = Text(status, style_of(status, result.stopped == SLOWER))
    return [str(key.repeat), str(key.attempt), ended, step, loss, took, hosts, result.reason or ""]


def _rank_line(rank: dict[str, Any]) -> str:
    code, end = rank.get("code"), "no exit"
    if rank.get("killed_by_us"):
        end = "killed by ultrabench"
    elif isinstance(code, int):
        end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    said = rank.get("error") or rank.get("last_line") or ""
    return f"  rank {rank['rank']}: {end} in phase {rank['phase']} {said}".rstrip()


def show_logs(given: str, follow: bool, sweep: str | None, results: Path) -> None:
    """Prints the log of the latest attempt; with `follow`, until the attempt is over."""
    folder, run_id, look = _find(given, sweep, results)
    offsets: dict[Path, int] = {}
    while True:
        attempts = look().attempts_of(run_id)
        if not attempts and not follow:
            raise SweepFolderError(f"run {run_id} has not been attempted yet; follow it with -f")
        over = bool(attempts) and attempts[-1].result is not None
        for path in _log_files(folder, attempts[-1]) if attempts else []:
            if over and offsets and path not in offsets:
                continue  # the same text again, collected after the end
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                text = file.read().decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
                sys.stdout.write(plain(text))
                offsets[path] = file.tell()
            sys.stdout.flush()
        if over or not follow:
            break
        time.sleep(FOLLOW_S)
    if not offsets:
        say(f"run {run_id} left no log{' yet' if not over else ''}")


def _log_files(folder: SweepFolder, attempt: AttemptState) -> list[Path]:
    """Saved logs; while the attempt runs on this machine, those its ranks are writing."""
    saved = sorted(folder.log_folder(*attempt.key).glob("*.log"))
    if saved or attempt.scratch is None:
        return saved
    return sorted((Path(attempt.scratch) / str(attempt.key)).glob("rank*.log"))


def _look(reader: JournalReader, known: Fold) -> SweepState:
    """The state now; only what is new in the journal is read."""
    return with_loss_outliers(known.add(reader.poll()))


def _find(given: str, sweep: str | None, results: Path) -> tuple[SweepFolder, str, Callable[[], SweepState]]:
    """The sweep, the run whose id begins with `given` or whose rank in the sweep it is, and its state, to call.

    Raises:
        SweepFolderError: none or several.
    """
    if given.isdecimal() and len(given) <= MOST_RANK_DIGITS:
        runs = _runs(folder := find_sweep(sweep, results))
        if 0 < int(given) <= len(runs):
            given, sweep = runs[int(given) - 1]["run_id"], str(folder.path)
        elif runs:
            raise SweepFolderError(
                f"no rank {given} in {folder.name}, which has {len(runs)}; give more than {MOST_RANK_DIGITS} digits of a "
                "run id, or a rank of: ultrabench sweep top"
            )
    folders = [find_sweep(sweep, results)] if sweep else _all_sweeps(results)
    matches: list[tuple[SweepFolder, str, Callable[[], SweepState]]] = []
    for folder in folders:
        read_sweep_json(folder)
        look = partial(_look, JournalReader(folder.journal, warn), Fold())
        ids = {k.run_id for k in look().attempts} | {row["run_id"] for row in read_rows(folder.plan)}
        matches += [(folder, i, look) for i in sorted(ids) if i.startswith(given)]
    if len(matches) == 1:
        return matches[0]
    where = sweep or f"{results}/"
    if not matches:
        told = f"no run in {where} has an id that begins with {given!r}, or that rank"
        raise SweepFolderError(f"{told}; see them with: ultrabench sweep top -n 100")
    several = ", ".join(f"{m[1]} ({m[0].name})" for m in matches[:5])
    raise SweepFolderError(f"{given!r} means {len(matches)} runs: {several}; give more digits or --sweep")


def _all_sweeps(results: Path) -> list[SweepFolder]:
    heads = sorted(results.glob("*/sweep.json"))
    return [SweepFolder(h.parent) for h in heads] or [find_sweep(None, results)]
