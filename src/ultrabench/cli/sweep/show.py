"""`ultrabench sweep show` and `logs` print everything about one run."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ultrabench.analysis.collect import collect
from ultrabench.analysis.numbers import formula_text, params_text, with_unit
from ultrabench.analysis.ranking import leaderboard
from ultrabench.analysis.rows import Row
from ultrabench.cli.predict.layout import ratio_line
from ultrabench.cli.sweep.top import cell_text, numbers
from ultrabench.cli.tables import plain, print_json, say, show, style_of, table, warn
from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.hardware import GIB
from ultrabench.rank_report import TRACE_PHASE
from ultrabench.record import to_dict
from ultrabench.result import SLOWER
from ultrabench.store.folder import SweepFolder, find_sweep
from ultrabench.store.journal import JournalReader
from ultrabench.store.state import AttemptState, Fold, SweepState
from ultrabench.store.sweep_json import SweepJson, read_sweep_json
from ultrabench.sweep.config.load import config_from_tree
from ultrabench.sweep.plan import predictor
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.running.outliers import for_answers

FOLLOW_S = 0.3
"""Seconds between two looks at the log that `sweep logs -f` follows."""
HEADING = re.compile(r"^--- rank \d+$", re.MULTILINE)
"""The line above each rank's part of a collected log."""
MAX_RANK_DIGITS = 5
"""Largest number of digits of a place in `sweep top`; a longer number is the beginning of a run id."""
HANG_COLUMNS = ("rank", "host", "state", "phase", "step", "part", "microbatches", "collective", "at")
TIME_PARTS = ("compute", "communication", "exposed_communication", "idle")


def show_run(name: str, sweep: str | None, as_json: bool, results: Path) -> None:
    """Prints the numbers, plan row, attempts and evidence of one run."""
    folder, run_id, read_state = find_run(name, sweep, results)
    attempts = read_state().by_run().get(run_id, [])
    row = next((r for r in read_rows(folder.plan) if r["run_id"] == run_id), None)
    ratios = _communication_ratios(read_sweep_json(folder), row, read_state()) if row else {}
    if as_json:
        spec = next((spec for a in attempts if (spec := a.spec_as(dict[str, Any]))), None)
        documents = [_document(a, folder.log_folder(a.key)) for a in attempts]
        header = {"sweep": folder.name, "run_id": run_id, "plan": row, "communication_over_compute": ratios}
        print_json({**header, "spec": spec, "attempts": documents})
        return
    plan_values = {name: value for name, value in (row or {}).items() if name not in ("order", "run_id")}
    columns = ("repeat", "attempt", "status", "step s", "loss", "seconds", "on", "reason")
    show(
        Text(f"run {run_id} of {folder.name}", "bold"),
        *_numbers(folder, run_id),
        Text("\nplan", "bold"),
        *(f"{name:<30} {with_unit(name, value)}" for name, value in plan_values.items() if value is not None),
        *([ratio_line(ratios, str((row or {}).get("dp_overlap")))] if ratios else []),
        table("\nattempts", *columns, rows=map(_columns, attempts)),
    )
    for attempt in attempts:
        logs = folder.log_folder(attempt.key)
        if attempt.result and attempt.result.evidence:
            show(Text(f"\nevidence of {attempt.key.repeat}.{attempt.key.attempt}", "bold"))
            show(*_evidence(attempt.result.evidence, logs))
        for summary in _traces(logs):
            show(*_trace_lines(summary))


def _communication_ratios(sweep: SweepJson, row: Row, state: SweepState) -> dict[str, float]:
    """The predicted communication of each axis over the computing beside it, on the links of the data sheet.

    Empty for a run that does not train, and where the configuration of the latest launch cannot be read.
    """
    run = next(runs_of(sweep, [row], state), None)
    if run and run.spec.kernel.kind != "probe" and (peak := sweep.peak(run.nodes, run.spec.kernel.precision)):
        with contextlib.suppress(ConfigError):
            config = config_from_tree(state.config or sweep.config)
            return predictor(config, run.nodes, peak).communication_ratios(run.spec)
    return {}


def _numbers(folder: SweepFolder, run_id: str) -> Iterator[Text]:
    """Lines with the numbers of a run in `sweep top`; none for a run that trains nothing."""
    rows = [row for row in _runs(folder) if row["run_id"] == run_id]
    for row in rows:
        text_by_name: dict[str, str | Text | None] = {"rank": f"{row['rank']}, {cell_text(row)}"}
        if row["num_params"]:
            text_by_name["model"] = params_text(row["num_params"], row["num_active_params"])
        text_by_name |= numbers(row) | {"suspect": row["suspect"]}
        if row["attempt"] is None:  # others are in the table of attempts
            text_by_name["reason"] = row["reason"]
        for name, value in text_by_name.items():
            if value:
                yield Text(f"{name:<14}").append(value)
        if row["mfu"] and row["num_experts"]:
            yield Text(formula_text([row["flops_formula"]], has_experts=True))


def _runs(folder: SweepFolder) -> list[Row]:
    """The runs of a sweep in the order of `sweep top`; empty for a sweep that only measures links."""
    return [row for runs in leaderboard(collect([folder], lambda note: None)) for row in runs]


def _evidence(evidence: dict[str, Any], logs: Path) -> Iterator[RenderableType]:
    """Lines that say how each rank ended and, for a hang, its cause and what every rank was doing."""
    for rank in evidence.get("ranks", []):
        yield _rank_line(rank)
    if "hang_cause" in evidence:
        yield f"\n{evidence['hang_cause']}\n"
    if hang_rows := evidence.get("hang_evidence"):
        rows = [[row.get(name) for name in HANG_COLUMNS] for row in hang_rows]
        yield table("ranks before they were killed", *HANG_COLUMNS, rows=rows)
    yield from map(str, sorted((logs / "hang_evidence").glob("*")))
    yield f"logs: {logs}{'' if logs.is_dir() else ' (gone)'}"


def _document(attempt: AttemptState, logs: Path) -> dict[str, Any]:
    fields = {"repeat": attempt.key.repeat, "attempt": attempt.key.attempt, "allocation": attempt.allocation}
    result = to_dict(attempt.result) if attempt.result else None
    return {**fields, "phase": attempt.phase, "result": result, "logs": str(logs), "profile": _traces(logs)}


def _columns(attempt: AttemptState) -> Iterator[object]:
    """Repeat, attempt, status, step time, loss, duration, hosts and reason of an attempt."""
    result = attempt.result
    yield attempt.key.repeat
    yield attempt.key.attempt
    if result is None:
        yield f"running: {attempt.phase}"
        return
    yield Text(result.status, style_of(result.status, result.stopped == SLOWER))
    yield f"{median(result.step_times_s):.4g}" if result.step_times_s else None
    yield None if result.loss_final is None else f"{result.loss_final:.6f}"
    yield None if result.duration_s is None else f"{result.duration_s:.1f}"
    yield ",".join(result.hostnames)
    yield result.reason


def _rank_line(rank: dict[str, Any]) -> str:
    code, end_text = rank.get("code"), "no exit code"
    if rank.get("killed_by_us"):
        end_text = "killed by ultrabench"
    elif isinstance(code, int):
        end_text = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    last_words = rank.get("error") or rank.get("last_line") or ""
    return f"  rank {rank['rank']}: {end_text} in phase {rank['phase']} {last_words}".rstrip()


def _traces(logs: Path) -> list[dict[str, Any]]:
    """The summaries of the traces of an attempt, sorted by rank; trace=true makes them."""
    summaries = []
    for path in logs.glob(f"{TRACE_PHASE}/rank*/summary.json"):
        with contextlib.suppress(OSError, ValueError):
            summaries.append({**json.loads(path.read_text()), "folder": str(path.parent)})
    return sorted(summaries, key=lambda summary: int(summary["rank"]))


def _trace_lines(summary: dict[str, Any]) -> Iterator[RenderableType]:
    """Lines about the mean step of one rank and its memory at the peak, and its longest kernels."""
    step_s = summary["step_time_s"]
    yield Text(f"\ninside rank {summary['rank']}, {summary['steps']} steps of {step_s:.4g} s", "bold")
    for part in TIME_PARTS:
        seconds = summary[f"{part}_s"]
        yield f"  {part.replace('_', ' ')}: {seconds:.4g} s ({_share(seconds, step_s)})"
    memory_text = ", ".join(f"{kind} {size / GIB:.4g}" for kind, size in summary["memory_bytes"].items())
    yield f"  memory in GiB: {memory_text}"
    kernels = ((k["name"][:60], k["calls"], k["seconds"]) for k in summary["top"])
    rows = [(name, f"{calls:g}", f"{s:.4g}", _share(s, step_s)) for name, calls, s in kernels]
    kind = "kernel" if summary["device"] == "cuda" else "operator"
    yield table("", kind, ">calls a step", ">s a step", ">of the step", rows=rows)
    yield f"files: {summary['folder']}"


def _share(seconds: float, total_s: float) -> str:
    return f"{seconds / total_s:.1%}" if total_s else ""


def show_logs(name: str, follow: bool, sweep: str | None, results: Path) -> None:
    """Prints the log of the latest attempt; with `follow`, goes on until the attempt has ended."""
    folder, run_id, read_state = find_run(name, sweep, results)
    offset_by_log: dict[Path, int] = {}
    is_silent = True
    while True:
        attempts = read_state().by_run().get(run_id, [])
        if not attempts and not follow:
            raise SweepFolderError(f"run {run_id} has not been attempted yet; add -f to wait for it")
        is_over = bool(attempts) and attempts[-1].result is not None
        for path in _log_files(folder, attempts[-1]) if attempts else []:
            if is_over and offset_by_log and path not in offset_by_log:
                continue  # the collected log repeats what was printed
            with path.open(encoding="utf-8", errors="replace") as file:  # \r ends a line, too
                file.seek(offset_by_log.get(path, 0))
                new_text = plain(file.read())
                sys.stdout.write(new_text)
                is_silent = is_silent and not HEADING.sub("", new_text).strip()
                offset_by_log[path] = file.tell()
            sys.stdout.flush()
        if is_over or not follow:
            break
        time.sleep(FOLLOW_S)
    if not offset_by_log:
        say(f"run {run_id} has no log{' yet' if not is_over else ''}")
    elif is_silent:
        command = f"ultrabench sweep show {run_id} --sweep {folder.display_name}"
        say(f"run {run_id} has printed nothing; to see its other facts: {command}")


def _log_files(folder: SweepFolder, attempt: AttemptState) -> list[Path]:
    """The saved logs of an attempt, or the logs that its ranks write now on this machine."""
    saved_logs = sorted(folder.log_folder(attempt.key).glob("*.log"))
    if saved_logs or attempt.scratch is None:
        return saved_logs
    return sorted((Path(attempt.scratch) / str(attempt.key)).glob("rank*.log"))


def _state_reader(folder: SweepFolder) -> Callable[[], SweepState]:
    """A function that returns the current state; each call reads only what is new in the journal."""
    reader, journal = JournalReader(folder.journal, warn), Fold()
    return lambda: for_answers(journal.add(reader.poll()))


def find_run(
    name: str, sweep: str | None, results: Path
) -> tuple[SweepFolder, str, Callable[[], SweepState]]:
    """The sweep folder and run_id that `name` means, and a function that returns the sweep's current state.

    `name` is the beginning of a run_id, or a rank in `sweep top`.

    Raises:
        SweepFolderError: `name` means no run, or several runs.
    """
    if name.isdecimal() and len(name) <= MAX_RANK_DIGITS:
        runs = _runs(folder := find_sweep(sweep, results))
        if 0 < int(name) <= len(runs):
            name, sweep = runs[int(name) - 1]["run_id"], str(folder.path)
        elif runs:
            remedy = f"give a rank of `ultrabench sweep top`, or more than {MAX_RANK_DIGITS} digits of an id"
            raise SweepFolderError(f"no rank {name} in {folder.name}, which has {len(runs)}; {remedy}")
    folders = [] if sweep else [SweepFolder(head.parent) for head in sorted(results.glob("*/sweep.json"))]
    matches: list[tuple[SweepFolder, str, Callable[[], SweepState]]] = []
    for folder in folders or [find_sweep(sweep, results)]:
        read_sweep_json(folder)
        read_state = _state_reader(folder)
        ids = {k.run_id for k in read_state().attempts} | {row["run_id"] for row in read_rows(folder.plan)}
        matches += [(folder, i, read_state) for i in sorted(ids) if i.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        fact = f"no run in {sweep or f'{results}/'} has that rank, or an id that begins with {name!r}"
        raise SweepFolderError(f"{fact}; to list them: ultrabench sweep top -n 100")
    examples = ", ".join(f"{m[1]} ({m[0].name})" for m in matches[:5])
    raise SweepFolderError(f"{name!r} matches {len(matches)} runs: {examples}; give more digits or --sweep")
