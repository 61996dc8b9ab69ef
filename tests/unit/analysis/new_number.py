"""Where a measured number shows that two declarations add: `python -m tests.unit.analysis.new_number FOLDER` prints
it.
"""

import importlib.machinery
import json
import sys
from pathlib import Path

ADDED = {
    "ultrabench.result": (
        "    checkpoint_save_s: float | None = column(\n",
        '    fan_power_w: float | None = column(\n        "Power of the fans of a node.", unit=WATTS, '
        "better=Better.LOWER,"
        ' report=Report("memory", "fan_w")\n    )\n',
    ),
    "ultrabench.rank_report": ('"allocator_retries": _to_count', '"fan_w": to_float, '),
}
"""Module -> a text in it, and what is added before that text: the field of RunResult, and the field of a report."""


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        place, added = ADDED[fullname]
        text = self.get_data(self.path).decode()
        assert text.count(place) == 1
        return compile(text.replace(place, added + place), self.path, "exec")


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target) if fullname in ADDED else None
        if spec:
            spec.loader = Loader(fullname, spec.origin)
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder)

from dataclasses import replace  # noqa: E402

from tests.sweep_folder import write  # noqa: E402
from tests.unit.agent.test_outcome import TASK, ok, progress_of  # noqa: E402
from tests.unit.analysis.page_tables import decoded  # noqa: E402
from tests.unit.analysis.sweeps import LAYOUTS, attempted, make_sweep, rows_of, spec_of  # noqa: E402
from tests.unit.analysis.tables import row, table_of  # noqa: E402
from ultrabench.agent.diagnose.outcome import classify  # noqa: E402
from ultrabench.analysis.figures import heatmap  # noqa: E402
from ultrabench.analysis.figures.kinds import prepare_figure  # noqa: E402
from ultrabench.analysis.figures.picture import render  # noqa: E402
from ultrabench.analysis.page.rows import document  # noqa: E402
from ultrabench.analysis.results.numbers import with_unit  # noqa: E402
from ultrabench.analysis.results.ranking import leaderboard, rank  # noqa: E402
from ultrabench.analysis.results.schema import SCHEMA, markdown  # noqa: E402
from ultrabench.analysis.studies.export.tracked_runs import tracked_runs  # noqa: E402
from ultrabench.rank_report import parse_line  # noqa: E402

NAME = "fan_power_w"


def places(folder):
    """Place where columns show -> what it tells of the new number."""
    progress = progress_of([ok(), ok()])
    for rank_number, watts in enumerate((40.0, 52.5)):
        line = json.dumps({"event": "memory", "fan_w": watts})
        progress.add([{"rank": rank_number, "line": parse_line(line)}])
    result = classify(progress, TASK, None)
    spec = spec_of(LAYOUTS[0])
    sweep = make_sweep(folder / "s", [spec])
    write(sweep, *attempted(spec, replace(result, hostnames=("n0",))))
    table = table_of(row("hot", 9.0, **{NAME: 90.0}), row("cool", 5.0, mbs=2, gas=16, **{NAME: 52.5}))
    ranked_cells = rank(table, rank_by=NAME)
    heatmap_picture = render(lambda: heatmap.figure(ranked_cells, title="sweep"), Path("f.svg")).decode()
    _, figure = prepare_figure("pareto", table, title="sweep", by=NAME)
    page = document(table, public=False)
    return {
        "result": result.fan_power_w,
        "row": [r[NAME] for r in rows_of(sweep)],
        "schema": str(SCHEMA.field(NAME).type),
        "documentation": [line for line in markdown().splitlines() if NAME in line],
        "terminal": with_unit(NAME, 1500.0),
        "rank by": [[run["run_id"] for run in board] for board in leaderboard(table, rank_by=NAME)],
        "heatmap": [text in heatmap_picture for text in (NAME, "lower is better", "52.5 W")],
        "pareto": f"{NAME} (lower is better)" in render(figure, Path("f.svg")).decode(),
        "trackers": [run.metrics[NAME] for run in tracked_runs(table)],
        "page": [
            sorted(decoded(page["columns"][NAME])),
            [line for line in page["schema"]["Outcome"] if NAME in line],
            [page["units"][NAME][fact] for fact in ("form", "symbol")],
        ],
    }


if __name__ == "__main__":
    print(json.dumps(places(Path(sys.argv[1]))))
