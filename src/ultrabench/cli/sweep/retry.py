"""`ultrabench sweep retry` tries failed runs again."""

from pathlib import Path

from ultrabench.cli.sweep.launch import as_launched, continue_sweep
from ultrabench.cli.tables import err, out, print_json, say, table, warn
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.result import Status
from ultrabench.store.folder import SweepFolder, find_sweep
from ultrabench.store.journal import read_journal
from ultrabench.store.state import AttemptState, SweepState, final_attempts, fold
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.plan import Plan, make_plan
from ultrabench.sweep.plan_table import read_rows
from ultrabench.sweep.running.losses import with_loss_outliers
from ultrabench.sweep.running.retry import decide_retry, excluded


def run_retry(
    sweep: str | None, only: str | None, run: str | None, dry_run: bool, as_json: bool, results: Path
) -> int:
    """Tries failed runs again, even where the retry policy would not; returns the exit code."""
    folder = find_sweep(sweep, results)
    read_sweep_json(folder)
    state = with_loss_outliers(fold(read_journal(folder.journal, warn)))
    chosen = _failed(folder, state, only, run)
    plan = make_plan(as_launched(folder, state))
    rows = [_retry_row(a, state, plan) for a in chosen]
    if as_json:
        print_json(rows)
    elif chosen:
        made = table(
            f"{'would run' if dry_run else 'runs'} again", "run", "attempt", "was", "reason", "policy"
        )
        for row in rows:
            made.add_row(*(str(v) for v in row.values()))
        out().print(made)
        for node, why in excluded(state, plan.config.retry).items():
            say(f"not on {node}: {why} (retry.forgive=[{node}] uses it again)")
    if not chosen:
        say("nothing to retry: no run ended in " + (only or "a failure"))
    if dry_run or not chosen:
        return 0
    return continue_sweep(folder, retry=[a.key for a in chosen], console=err() if as_json else None)


def _retry_row(attempt: AttemptState, state: SweepState, plan: Plan) -> dict[str, object]:
    """The table row of an attempt to make: its run, how that ended before, and what the retry policy says."""
    result, key = attempt.result, attempt.key
    assert result is not None
    run = next((r for r in plan.runs if r.run_id == key.run_id), None)
    share = run.prediction.memory_share if run else 1.0
    tries = [a for a in state.attempts_of(key.run_id) if a.key.repeat == key.repeat]
    verdict = decide_retry(tries, plan.config.retry, memory_share=share)
    return {
        "run_id": key.run_id,
        "attempt": key.attempt + 1,
        "was": result.status.value,
        "reason": result.reason,
        "policy": f"{'again' if verdict.again else 'stands'}; {verdict.why}",
    }


def _failed(folder: SweepFolder, state: SweepState, only: str | None, run: str | None) -> list[AttemptState]:
    """The failed final attempts that were asked for; confirmed OOMs only if `only` or `run` names them."""
    answers = {Status.OK, Status.SKIPPED, Status.REJECTED}
    names = [s.value for s in Status if s not in answers]
    wanted = [w.strip() for w in only.split(",")] if only else names
    for name in wanted:
        if name not in names:
            raise ConfigError(unknown_name("status to retry", name, names))
    planned = {row["run_id"] for row in read_rows(folder.plan, runs_only=True)}
    if run is not None and not any(r.startswith(run) for r in planned):
        raise ConfigError(f"no run of {folder.name} has an id that begins with {run!r}; see sweep status")
    return [
        a
        for (run_id, _), a in sorted(final_attempts(state).items())
        if a.result
        and a.result.status.value in wanted
        and run_id in planned
        and run_id.startswith(run or "")
        and (only or run or not (a.result.status == Status.OOM and a.result.confirmed))
    ]
