"""Why none of the runs of a table may win, in one line: how many are suspect, stopped or failed, and what to do."""

from collections import Counter
from collections.abc import Iterable

import pandas as pd

from ultrabench.errors import ConfigError, counted
from ultrabench.partial_step import SCREENED_BY
from ultrabench.result import SLOWER, Status
from ultrabench.standing import failed_in_full
from ultrabench.sweep.running.early_stopping import IN_FULL

_LOAD_REMEDY = (
    "to accept these runs, launch again with measure.max_foreign_load=null; "
    "or measure on an idle machine under another name="
)
_REMEDY_BY_CODE = {
    "foreign_load": _LOAD_REMEDY,
    "foreign_gpu_processes": _LOAD_REMEDY,
    "mfu": "correct hardware.peak_flops_per_s and launch again",
}
"""Code of a doubt -> what to do if most suspect runs have it."""


def none_left(runs: pd.DataFrame, conclusion: str, noun: str = "run") -> ConfigError:
    """The refusal of runs that are all left out.

    Args:
        runs: rows of runs, with the columns sweep, run_id, status, suspect, suspect_codes, stopped and screened. A row
            that screened a run whose start in full has failed does not count.
        conclusion: what no run can do, such as `none can win`.
        noun: what a row is, such as `repeat`.
    """
    runs = runs[~_is_disproved(runs)]
    is_ok = runs["status"] == Status.OK
    suspect_runs = runs[is_ok & runs["suspect"].notna()]
    is_stopped = is_ok & runs["suspect"].isna() & (runs["stopped"] == SLOWER)
    is_screened = is_ok & runs["suspect"].isna() & ~is_stopped & runs["screened"].notna()
    reasons = [(len(suspect_runs), "suspect"), (int(is_stopped.sum()), "stopped early as slower")]
    reasons += [(int(is_screened.sum()), f"only screened, {SCREENED_BY}")]
    reasons += [(n, str(status)) for status, n in runs.loc[~is_ok, "status"].value_counts().items()]
    texts = [f"{n:,} {reason}" for n, reason in reasons if n]
    if len(suspect_runs):
        texts[0] += f" ({suspect_runs['suspect'].iloc[0]})"
    fact = f"{counted(len(runs), noun)}, {conclusion}{': ' if texts else ''}{', '.join(texts)}"
    if len(suspect_runs):
        return ConfigError(fact, _remedy(suspect_runs["suspect_codes"]))
    if is_stopped.any():
        return ConfigError(fact, f"to measure every run in full, launch under another name= with {IN_FULL}")
    if is_screened.any():
        return ConfigError(fact, "launch the sweep again: it measures the best ones in full")
    todo = "see why: ultrabench plot failures" if len(runs) else "launch a sweep: ultrabench sweep launch"
    return ConfigError(fact, todo)


def _is_disproved(runs: pd.DataFrame) -> pd.Series:
    """Whether each row screened a run whose start in full has failed, so that it stands as failed."""
    is_ok, is_screened = runs["status"] == Status.OK, runs["screened"].notna()
    run_keys = pd.Series([*zip(runs["sweep"], runs["run_id"], strict=True)], runs.index, object)
    ends = pd.Series([*zip(runs["status"], is_screened, strict=True)], runs.index, object)
    has_failed = ends.groupby(run_keys).transform(failed_in_full)
    return is_ok & has_failed.astype(bool)


def _remedy(codes_by_run: Iterable[Iterable[str] | None]) -> str:
    """What to do about suspect runs, by the most frequent code of the reasons to doubt them."""
    num_by_code = Counter(code for codes in codes_by_run if codes is not None for code in codes)
    most_frequent = next((code for code, _ in num_by_code.most_common(1)), "")
    return _REMEDY_BY_CODE.get(most_frequent, "to measure them again, launch under another name=")
