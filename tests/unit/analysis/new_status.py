"""What a status that is added to its table alone changes: `python -m tests.unit.analysis.new_status FOLDER` prints
it.
"""

import importlib.machinery
import json
import sys
from dataclasses import replace
from pathlib import Path

ADDED = {
    '    REJECTED = "rejected"\n': '    MELTED = "melted"\n',
    "    Status.SKIPPED: StatusTraits(": 'Status.MELTED: StatusTraits("melted away", "#123456", "", '
    '"run", pause=True),\n',
}
"""Text of result.py -> what is added after it, or before it if it is no whole line."""


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        text = self.get_data(self.path).decode()
        for place, added in ADDED.items():
            assert place in text
            text = text.replace(place, place + added if place.endswith("\n") else added + place)
        return compile(text, self.path, "exec")


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target) if fullname == "ultrabench.result" else None
        if spec:
            spec.loader = Loader(fullname, spec.origin)
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder)

from tests.sweep_folder import write  # noqa: E402
from tests.unit.analysis.sweeps import LAYOUTS, OK, attempted, make_sweep, spec_of  # noqa: E402
from tests.unit.analysis.tables import row, table_of  # noqa: E402
from ultrabench.analysis.figures.kinds import prepare_figure  # noqa: E402
from ultrabench.analysis.figures.picture import render  # noqa: E402
from ultrabench.analysis.page.rows import document  # noqa: E402
from ultrabench.analysis.results import cells, ranking  # noqa: E402
from ultrabench.analysis.studies.compare.compare import compare  # noqa: E402
from ultrabench.cli.sweep.live import counts_line  # noqa: E402
from ultrabench.cli.tables import style_of  # noqa: E402
from ultrabench.result import Status  # noqa: E402
from ultrabench.store.journal import read_journal  # noqa: E402
from ultrabench.store.state import fold  # noqa: E402
from ultrabench.store.sweep_json import read_sweep_json  # noqa: E402
from ultrabench.sweep.config.sweep_config import ATTEMPT_KEYS, RetryPolicy  # noqa: E402
from ultrabench.sweep.plan_table import read_rows, runs_of  # noqa: E402
from ultrabench.sweep.running.blame import blame_of  # noqa: E402
from ultrabench.sweep.running.progress import progress_of  # noqa: E402
from ultrabench.sweep.running.retry import decide_retry  # noqa: E402


def places(folder):
    """Place where statuses show -> what it tells of a run that melted."""
    spec, status = spec_of(LAYOUTS[0]), Status("melted")
    sweep = make_sweep(folder / "s", [spec])
    write(sweep, *attempted(spec, replace(OK, status=status, step_times_s=())))
    state, head = fold(read_journal(sweep.journal)), read_sweep_json(sweep)
    runs = [*runs_of(head, read_rows(sweep.plan, runs_only=True), state)]
    now = progress_of("s", runs, state, "cuda")
    pauses = {"backoff_s": 30.0, "backoff_max_s": 60.0, "breaker": 10}
    attempts = dict.fromkeys(ATTEMPT_KEYS, 1)
    policy = RetryPolicy(attempts=attempts, **pauses, max_excluded=8, forgive=(), causes={})
    decision = decide_retry([*state.attempts.values()], policy, blame=blame_of(state, policy))
    other = row("b", mbs=2, gas=16)
    table, before = table_of(row("a", status="melted"), other), table_of(row("a"), other)
    points, figure = prepare_figure("failures", table, title="sweep")
    picture = render(figure, Path("f.svg")).decode()
    page = document(table, public=False)
    return {
        "status": [now.by_status, [attempt.result.status for _, attempt in now.failures]],
        "live": "1 melted" in counts_line(now, is_active=False).plain,
        "terminal": style_of("melted"),
        "retry": [decision.retry, decision.pause_s],
        "figure": [sorted(points["shown_status"]), "melted away" in picture, "#123456" in picture],
        "heatmap": [cell.num_failed for cell in ranking.rank(table)],
        "note": "1 melted" in cells.notes(table),
        "top": [[run["status"] for run in board] for board in ranking.leaderboard(table)],
        "compare": [*compare(before, table, 0.05).rows["finding"].dropna()],
        "page": [page["tiers"]["melted"], "melted" in page["columns"]["state"]["distinct"]],
    }


if __name__ == "__main__":
    print(json.dumps(places(Path(sys.argv[1]))))
