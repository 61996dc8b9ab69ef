"""`ultrabench sweep show` and `logs` print everything about one run."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ultrabench.analysis.results.collect import collect
from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.numbers import formula_text, params_text, with_unit
from ultrabench.analysis.results.ranking import leaderboard
from ultrabench.analysis.results.rows import Row
from ultrabench.cli.predict.layout import ratio_line
from ultrabench.cli.sweep.run_command import ProgramStart, start_lines, start_of
from ultrabench.cli.sweep.top import cell_text, number_texts
from ultrabench.cli.tables import plain_text, print_json, say, show, style_of, table, three_digits, warn
from ultrabench.column import FRACTION, SECONDS, memory_axis
from ultrabench.errors import ConfigError, SweepFolderError, UltrabenchError
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.partial_step import PART_FOLDER
from ultrabench.rank_report import TRACE_PHASE
from ultrabench.record import from_dict, to_dict
from ultrabench.result import SLOWER
from ultrabench.run import AttemptKey, RunSpec
from ultrabench.store.folder import SweepFolder, find_sweep
from ultrabench.store.journal import JournalReader
from ultrabench.store.state import AttemptState, Fold, SweepState
from ultrabench.store.sweep_json import SweepJson, read_sweep_json
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.load import config_from_tree
from ultrabench.sweep.plan import predictor
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.running.blame import latest_blame
from ultrabench.sweep.running.outliers import for_answers

LOG_POLL_S = 0.3
"""Seconds between two looks at the log that `sweep logs -f` follows."""
RANK_HEADING = re.compile(r"^--- rank \d+$", re.MULTILINE)
"""The line above each rank's part of a collected log."""
MAX_RANK_DIGITS = 5
"""Largest number of digits of a place in `sweep top`; a longer number is the beginning of a run id."""
HANG_COLUMNS = ("rank", "host", "state", "phase", "step", "part", "microbatches", "collective", "at")
"""Keys of the evidence of a hang for one rank, and columns of its table."""
TIME_PARTS = ("compute", "communication", "exposed_communication", "idle")
"""Parts of a traced step, whose seconds the summary of a trace holds under these names with `_s`."""


def show_run(id_or_rank: str, sweep: str | None, as_json: bool, results_dir: Path) -> None:
    """Prints the numbers, plan row, attempts and evidence of one run."""
    folder, run_id, read_state = find_run(id_or_rank, sweep, results_dir)
    state = read_state()
    attempts = state.by_run().get(run_id, [])
    plan_row = next((row for row in read_rows(folder.plan) if row["run_id"] == run_id), None)
    sweep_json = read_sweep_json(folder)
    ratios = _communication_ratios(sweep_json, plan_row, state) if plan_row else {}
    run = next(runs_of(sweep_json, [plan_row] if plan_row else [], state), None)
    start = _start(sweep_json, run, attempts, state)
    if as_json:
        spec = next((spec for a in attempts if (spec := a.spec_as(dict[str, Any]))), None)
        documents = [_attempt_document(a, folder.log_folder(a.key)) for a in attempts]
        plan_facts = {"plan": plan_row, "communication_over_compute": ratios, "spec": spec}
        nodes = {"nodes_not_used": _unused_nodes(state, attempts)}
        facts = {**plan_facts, **({"program": start} if start else {})}
        print_json({"sweep": folder.name, "run_id": run_id, **facts, "attempts": documents, **nodes})
        return
    plan_values = {
        name: value for name, value in (plan_row or {}).items() if name not in ("order", "run_id", "slice")
    }
    plan_values |= {"screened by": run.screening_text} if run else {}
    step_heading, loss_heading, duration_heading = (
        column_of(name).short_heading for name in ("step_time_s", "loss_final", "duration_s")
    )
    is_any_screened = any(a.result and a.result.is_screened for a in attempts)
    measured_headings = ("measured",) if is_any_screened else ()
    result_headings = (
        "status",
        *measured_headings,
        step_heading,
        loss_heading,
        duration_heading,
        "on",
        "reason",
    )
    attempt_rows = [_attempt_cells(a, with_screening=is_any_screened) for a in attempts]
    show(
        Text(f"run {run_id} of {folder.name}", "bold"),
        *_number_lines(folder, run_id),
        Text("\nplan", "bold"),
        *(f"{name:<30} {with_unit(name, value)}" for name, value in plan_values.items() if value is not None),
        *([ratio_line(ratios, str((plan_row or {}).get("dp_overlap")))] if ratios else []),
        *([Text("\nprogram", "bold"), *start_lines(start)] if start else []),
        table("\nattempts", "repeat", "attempt", *result_headings, rows=attempt_rows),
        *_node_lines(state, attempts),
    )
    for attempt in attempts:
        log_folder = folder.log_folder(attempt.key)
        if attempt.result and attempt.result.evidence:
            show(Text(f"\nevidence of {attempt.key.repeat}.{attempt.key.attempt}", "bold"))
            show(*_evidence_lines(attempt.result.evidence, log_folder))
        for summary in _trace_summaries(log_folder):
            show(*_trace_lines(summary))


def _start(
    sweep: SweepJson, run: Candidate | None, attempts: Sequence[AttemptState], state: SweepState
) -> ProgramStart | None:
    """How the latest attempt of a run started its program, or the first one will; None for our own kernel.

    It is also None where the configuration of the latest launch cannot be read, or its sizes are unknown.
    """
    if sweep.kernel.forks:
        return None
    with contextlib.suppress(UltrabenchError):
        config = config_from_tree(state.config or sweep.config)
        specs = (from_dict(RunSpec, values) for a in attempts if (values := a.spec_as(dict[str, Any])))
        if spec := next(chain(specs, [run.spec] if run else []), None):
            key = attempts[-1].key if attempts else AttemptKey(spec.run_id, 0, 0)
            return start_of(spec, key, config, run.slice if run and _is_screening(attempts) else None)
    return None


def _is_screening(attempts: Sequence[AttemptState]) -> bool:
    """Whether the latest attempt screens its run, or the first one will."""
    latest_result = attempts[-1].result if attempts else None
    # A lost attempt does not say what it was to measure.
    return bool(latest_result and latest_result.is_screened) or not any(attempt.ok for attempt in attempts)


def _unused_nodes(state: SweepState, attempts: Sequence[AttemptState]) -> dict[str, str]:
    """Node of these attempts that jobs do not use, or only if they must -> a line that says why."""
    hosts = {host for a in attempts if a.result for host in a.result.hostnames}
    return {node: line for node, line in latest_blame(state).node_lines.items() if node in hosts}


def _node_lines(state: SweepState, attempts: Sequence[AttemptState]) -> Iterator[Text]:
    """Where each failure began, and the nodes of a run that jobs do not use, with the evidence against them."""
    for attempt in attempts:
        if attempt.result and attempt.result.began_on and len(attempt.result.hostnames) > 1:
            hosts = ",".join(attempt.result.began_on)
            yield Text(f"{attempt.key.repeat}.{attempt.key.attempt} began to fail on {hosts}")
    for line in _unused_nodes(state, attempts).values():
        yield Text(line, "yellow")


def _communication_ratios(sweep: SweepJson, row: Row, state: SweepState) -> dict[str, float]:
    """Axis -> its predicted communication time over its compute time, with links as fast as in the data sheet.

    Empty for a run that does not train, and where the configuration of the latest launch cannot be read.
    """
    run = next(runs_of(sweep, [row], state), None)
    if run and run.spec.kernel.trains and (peak := sweep.peak(run.nodes, run.spec.kernel.precision)):
        with contextlib.suppress(ConfigError):
            config = config_from_tree(state.config or sweep.config)
            return predictor(config, run.nodes, peak).communication_ratios(run.spec)
    return {}


def _number_lines(folder: SweepFolder, run_id: str) -> Iterator[Text]:
    """Lines with the numbers of a run in `sweep top`; none for a run that trains nothing."""
    for row in (row for row in _ranked_rows(folder) if row["run_id"] == run_id):
        text_by_name: dict[str, str | Text | None] = {"rank": f"{row['rank']}, {cell_text(row)}"}
        if row["num_params"]:
            text_by_name["model"] = params_text(row["num_params"], row["num_active_params"])
        text_by_name |= number_texts(row) | {"suspect": row["suspect"]}
        if row["attempt"] is None:  # others are in the table of attempts
            text_by_name["reason"] = row["reason"]
        for name, value in text_by_name.items():
            if value:
                yield Text(f"{name:<14}").append(value)
        if row["mfu"] and row["num_experts"]:
            yield Text(formula_text([row["flops_formula"]], has_experts=True))


def _ranked_rows(folder: SweepFolder) -> list[Row]:
    """The runs of a sweep in the order of `sweep top`; empty for a sweep that only measures links."""
    return [row for runs in leaderboard(collect([folder], lambda note: None)) for row in runs]


def _evidence_lines(evidence: dict[str, Any], log_folder: Path) -> Iterator[RenderableType]:
    """Lines that say how each rank ended and, for a hang, its cause and what every rank was doing."""
    for rank in evidence.get("ranks", []):
        yield _rank_line(rank)
    if "hang_cause" in evidence:
        yield f"\n{evidence['hang_cause']}\n"
    if hang_rows := evidence.get("hang_evidence"):
        rows = [[row.get(column) for column in HANG_COLUMNS] for row in hang_rows]
        yield table("ranks before they were killed", *HANG_COLUMNS, rows=rows)
    yield from map(str, sorted(log_folder.glob("**/hang_evidence/*")))
    yield f"logs: {log_folder}{'' if log_folder.is_dir() else ' (gone)'}"


def _attempt_document(attempt: AttemptState, log_folder: Path) -> dict[str, Any]:
    """An attempt as `sweep show --json` prints it."""
    key, result = attempt.key, to_dict(attempt.result) if attempt.result else None
    key_fields = {"repeat": key.repeat, "attempt": key.attempt, "allocation": attempt.allocation}
    log_fields = {"logs": str(log_folder), "profile": _trace_summaries(log_folder)}
    return {**key_fields, "phase": attempt.phase, "result": result, **log_fields}


def _attempt_cells(attempt: AttemptState, *, with_screening: bool) -> Iterator[object]:
    """Repeat, attempt, status, step time, loss, duration, hosts and reason of an attempt.

    Args:
        with_screening: whether what was measured follows the status.
    """
    result = attempt.result
    yield attempt.key.repeat
    yield attempt.key.attempt
    if result is None:
        yield f"running: {attempt.phase}"
        return
    yield Text(result.status, style_of(result.status, result.stopped == SLOWER))
    if with_screening:
        yield result.measured_text if attempt.ok else None
    yield with_unit("step_time_s", median(result.step_times_s) if result.step_times_s else None)
    yield None if result.loss_final is None else column_of("loss_final").unit.exact_text(result.loss_final)
    yield with_unit("duration_s", result.duration_s)
    yield ",".join(result.hostnames)
    yield result.reason


def _rank_line(rank: dict[str, Any]) -> str:
    """A line that says how the process of a rank ended, in which phase, and its error or last line."""
    exit_code, end_text = rank.get("code"), "no exit code"
    if rank.get("killed_by_us"):
        end_text = "killed by ultrabench"
    elif isinstance(exit_code, int):
        end_text = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    last_message = rank.get("error") or rank.get("last_line") or ""
    return f"  rank {rank['rank']}: {end_text} in phase {rank['phase']} {last_message}".rstrip()


def _trace_summaries(log_folder: Path) -> list[dict[str, Any]]:
    """The summaries of the traces of an attempt, sorted by rank; trace=true makes them."""
    summaries = []
    for summary_file in log_folder.glob(f"{TRACE_PHASE}/rank*/summary.json"):
        with contextlib.suppress(OSError, ValueError):
            summaries.append({**json.loads(summary_file.read_text()), "folder": str(summary_file.parent)})
    return sorted(summaries, key=lambda summary: int(summary["rank"]))


def _trace_lines(summary: dict[str, Any]) -> Iterator[RenderableType]:
    """Lines about the mean step of one rank and its memory at the peak, and its longest kernels."""
    step_s = summary["step_time_s"]
    yield Text(f"\ninside rank {summary['rank']}, {summary['steps']} steps of {SECONDS.text(step_s)}", "bold")
    for part in TIME_PARTS:
        part_s = summary[f"{part}_s"]
        yield f"  {part.replace('_', ' ')}: {SECONDS.text(part_s)} ({_share_text(part_s, step_s)})"
    bytes_by_kind = summary["memory_bytes"]
    unit, factor = memory_axis(max(bytes_by_kind.values(), default=0))
    memory_texts = (f"{kind} {three_digits(factor * nbytes)}" for kind, nbytes in bytes_by_kind.items())
    yield f"  memory in {unit}: {', '.join(memory_texts)}"
    kernels = ((k["name"][:60], k["calls"], k["seconds"]) for k in summary["top"])
    rows = [(name, f"{calls:g}", SECONDS.bare_text(s), _share_text(s, step_s)) for name, calls, s in kernels]
    name_heading = "kernel" if DEVICE_KINDS[summary["device"]].has_gpus else "operator"
    yield table("", name_heading, ">calls a step", f">{SECONDS.symbol} a step", ">of the step", rows=rows)
    yield f"files: {summary['folder']}"


def _share_text(part_s: float, total_s: float) -> str:
    """The share of a part in `total_s` as percent; empty if the total is zero."""
    return FRACTION.text(part_s / total_s) if total_s else ""


def show_logs(id_or_rank: str, follow: bool, sweep: str | None, results_dir: Path) -> None:
    """Prints the log of the latest attempt; with `follow`, goes on until the attempt has ended."""
    folder, run_id, read_state = find_run(id_or_rank, sweep, results_dir)
    offset_by_log: dict[Path, int] = {}
    is_silent = True
    while True:
        attempts = read_state().by_run().get(run_id, [])
        if not attempts and not follow:
            raise SweepFolderError(f"run {run_id} has not been attempted yet; add -f to wait for it")
        is_over = bool(attempts) and attempts[-1].result is not None
        has_followed = bool(offset_by_log)
        for log_path in _log_files(folder, attempts[-1]) if attempts else []:
            if is_over and has_followed and log_path not in offset_by_log:
                continue  # the collected log repeats what was printed
            with log_path.open(encoding="utf-8", errors="replace") as log_file:  # \r ends a line, too
                offset = offset_by_log.get(log_path, 0)
                is_anew = offset > log_path.stat().st_size  # that of the second start of a program
                log_file.seek(0 if is_anew else offset)
                new_text = plain_text(log_file.read())
                if (
                    new_text
                    and log_path not in offset_by_log
                    and log_path.parent.name.startswith(PART_FOLDER)
                ):
                    gas = log_path.parent.name.removeprefix(PART_FOLDER)
                    sys.stdout.write(f"--- start with {gas} micro-batches a step, {log_path.stem}\n")
                sys.stdout.write(new_text)
                is_silent = is_silent and not RANK_HEADING.sub("", new_text).strip()
                offset_by_log[log_path] = log_file.tell()
            sys.stdout.flush()
        if is_over or not follow:
            break
        time.sleep(LOG_POLL_S)
    if not offset_by_log:
        say(f"run {run_id} has no log{' yet' if not is_over else ''}")
    elif is_silent:
        command = f"ultrabench sweep show {run_id} --sweep {folder.display_name}"
        say(f"run {run_id} has printed nothing; to see its other facts: {command}")


def _log_files(folder: SweepFolder, attempt: AttemptState) -> list[Path]:
    """The saved logs of an attempt, or the logs that its ranks write now on this machine."""
    # Each of two starts has a folder, with the micro-batches of its steps in its name.
    saved_logs = sorted(
        folder.log_folder(attempt.key).glob("**/*.log"), key=lambda path: (len(path.parent.name), path)
    )
    live_folder = Path(attempt.scratch) / str(attempt.key) if attempt.scratch else None
    live_logs = sorted(live_folder.glob("rank*.log")) if live_folder else []
    return (live_logs or saved_logs) if attempt.result is None else (saved_logs or live_logs)


def _state_reader(folder: SweepFolder) -> Callable[[], SweepState]:
    """A function that returns the current state; each call reads only what is new in the journal."""
    journal_reader, state_fold = JournalReader(folder.journal, warn), Fold()
    return lambda: for_answers(state_fold.add(journal_reader.poll()))


def find_run(
    id_or_rank: str, sweep: str | None, results_dir: Path
) -> tuple[SweepFolder, str, Callable[[], SweepState]]:
    """The sweep folder and run_id that a user means, and a function that returns the sweep's current state.

    `id_or_rank` is the beginning of a run_id, or a rank in `sweep top`.

    Raises:
        SweepFolderError: `id_or_rank` means no run, or several runs.
    """
    if id_or_rank.isdecimal() and len(id_or_rank) <= MAX_RANK_DIGITS:
        ranked_rows = _ranked_rows(folder := find_sweep(sweep, results_dir))
        if 0 < int(id_or_rank) <= len(ranked_rows):
            id_or_rank, sweep = ranked_rows[int(id_or_rank) - 1]["run_id"], str(folder.path)
        elif ranked_rows:
            remedy = f"give a rank of `ultrabench sweep top`, or more than {MAX_RANK_DIGITS} digits of an id"
            fact = f"no rank {id_or_rank} in {folder.name}, which has {len(ranked_rows)}"
            raise SweepFolderError(f"{fact}; {remedy}")
    paths = [] if sweep else sorted(results_dir.glob("*/sweep.json"))
    folders = [SweepFolder(path.parent) for path in paths] or [find_sweep(sweep, results_dir)]
    matches: list[tuple[SweepFolder, str, Callable[[], SweepState]]] = []
    for folder in folders:
        read_sweep_json(folder)
        read_state = _state_reader(folder)
        planned_ids = {row["run_id"] for row in read_rows(folder.plan)}
        run_ids = sorted({key.run_id for key in read_state().attempts} | planned_ids)
        matches += [(folder, run_id, read_state) for run_id in run_ids if run_id.startswith(id_or_rank)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        searched_folder = sweep or f"{results_dir}/"
        fact = f"no run in {searched_folder} has that rank, or an id that begins with {id_or_rank!r}"
        raise SweepFolderError(f"{fact}; to list them: ultrabench sweep top -n 100")
    examples = ", ".join(f"{m[1]} ({m[0].name})" for m in matches[:5])
    fact = f"{id_or_rank!r} matches {len(matches)} runs: {examples}"
    raise SweepFolderError(f"{fact}; give more digits or --sweep")
