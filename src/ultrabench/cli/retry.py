"""`ultrabench sweep retry`."""

from pathlib import Path

from ultrabench.cli.launch import continue_sweep
from ultrabench.cli.tables import err, out, print_json, say, table, warn
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.folder import SweepFolder, find_sweep
from ultrabench.journal import read_journal
from ultrabench.result import Status
from ultrabench.state import AttemptState, SweepState, final_attempts, fold
from ultrabench.sweep.plan_table import read_plan


def run_retry(
    sweep: str | None, only: str | None, run: str | None, dry_run: bool, as_json: bool, results: Path
) -> int:
    """Runs failed runs again, whatever the policy had settled; the exit code."""
    folder = find_sweep(sweep, results)
    folder.read_head()
    state = fold(read_journal(folder.journal, warn))
    chosen = _failed(folder, state, only, run)
    if as_json:
        print_json([_retry_row(a) for a in chosen])
    elif chosen:
        made = table(f"{'would run' if dry_run else 'runs'} again", "run", "attempt", "was", "reason")
        for a in chosen:
            made.add_row(*(str(v) for v in _retry_row(a).values()))
        out().print(made)
    if not chosen:
        say("nothing to retry: no run ended in " + (only or "a failure"))
    if dry_run or not chosen:
        return 0
    return continue_sweep(folder, retry=[a.key for a in chosen], console=err() if as_json else None)


def _retry_row(attempt: AttemptState) -> dict[str, object]:
    result = attempt.result
    assert result is not None
    return {
        "run_id": attempt.key.run_id,
        "attempt": attempt.key.attempt + 1,
        "was": result.status.value,
        "reason": result.reason,
    }


def _failed(folder: SweepFolder, state: SweepState, only: str | None, run: str | None) -> list[AttemptState]:
    """The final attempts that failed and were asked for."""
    answers = {Status.OK, Status.SKIPPED, Status.REJECTED}
    names = [s.value for s in Status if s not in answers]
    wanted = [w.strip() for w in only.split(",")] if only else names
    for name in wanted:
        if name not in names:
            raise ConfigError(unknown_name("status to retry", name, names))
    planned = {r.run_id for r in read_plan(folder.plan)}
    if run is not None and not any(r.startswith(run) for r in planned):
        raise ConfigError(f"no run of {folder.name} has an id that begins with {run!r}; see sweep status")
    return [
        a
        for (run_id, _), a in sorted(final_attempts(state).items())
        if a.result and a.result.status.value in wanted and run_id in planned and run_id.startswith(run or "")
    ]
