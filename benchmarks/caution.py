"""The caution of the adaptive search, chosen on some cells of a finished sweep and judged on the others.

`python benchmarks/caution.py FILE.parquet` replays the search with each value of CHANCE, the chance to be faster at
which a cell goes on. No cell is searched with constants that were fitted to it: the profile is fitted without its
model, and once more without its number of nodes. For each of the two, the table has

- all cells: hours of the exhaustive sweep, cells that end within 2 % of their best, and the largest regret;
- halves: the same for random parts of the cells, with a half of their layouts each, whose best layouts differ;
- the choice: for each cell, the largest CHANCE with which all other cells end within 2 %, and what these choices give.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrabench.analysis.predict.cases import Case
from ultrabench.analysis.predict.replay import ReplayedRun, cells_of, replay
from ultrabench.analysis.predict.validate import GROUPS, without_own_group
from ultrabench.cli.predict.cases import open_cases
from ultrabench.sweep.config.load import load_config, load_profile
from ultrabench.sweep.plan import CellKey
from ultrabench.sweep.predict import search
from ultrabench.sweep.predict.profile import Profile

CHANCES = (0.2, 0.1, 0.07, 0.05, 0.04, 0.03, 0.02, 0.01)
BATCHES = (1, 8, 16)
NEAR = 0.02
"""Regret up to which a cell counts as found."""
DRAWS, SEED = 6, 1
"""Random halves of each cell."""
Cells = Mapping[CellKey, Sequence[ReplayedRun]]


def cells_without(cases: Sequence[Case], used: Profile, by: str) -> Cells:
    """The cells, each predicted by a profile that is fitted without its model or its number of nodes."""
    prior = load_profile(used.prior) if used.prior else used
    limits = {name: value for name, value in used.memory.items() if name.endswith("limit")}
    profiles = without_own_group(cases, replace(prior, memory=prior.memory | limits), by)
    group = GROUPS[by]
    cells: dict[CellKey, Sequence[ReplayedRun]] = {}
    for name, profile in profiles.items():
        cells |= cells_of([case for case in cases if group(case) == name], profile)
    return cells


def halves(cells: Cells) -> Cells:
    """Random halves of the cells in which any layout works, named by model and draw."""
    draw = random.Random(SEED)
    parts = {
        (f"{model} {n}", nodes): [run for run in runs if draw.random() < 0.5]
        for (model, nodes), runs in cells.items()
        for n in range(DRAWS)
    }
    return {key: runs for key, runs in parts.items() if any(run.step_time_s for run in runs)}


def replayed(cells: Cells, chance: float, batch: int) -> dict[str, Any]:
    search.CHANCE = chance
    return replay(cells, "adaptive", batch, load_config().max_p_oom)


def text(document: Mapping[str, Any]) -> str:
    regrets = [cell["regret"] for cell in document["cells"]]
    near = sum(regret is not None and regret <= NEAR for regret in regrets)
    worst = "none" if None in regrets else f"{max(regrets):.1%}"
    return f"{document['gpu_hours_share']:7.2%} {near:4}/{len(regrets)} {worst:>6}"


def choose(cells: Cells, documents: Mapping[float, Mapping[str, Any]]) -> None:
    """Prints the CHANCE that the other cells choose for each cell, and what these choices give together."""
    regrets = {c: [cell["regret"] or 0.0 for cell in d["cells"]] for c, d in documents.items()}
    totals = [sum(run.cost() for run in runs) for runs in cells.values()]
    chosen, found, hours = list[str](), 0, 0.0
    for n, ((model, nodes), total) in enumerate(zip(cells, totals, strict=True)):
        good = [c for c in CHANCES if all(r <= NEAR for m, r in enumerate(regrets[c]) if m != n)]
        chance = max(good, default=min(CHANCES))
        chosen.append(f"{model} {nodes}: {chance:g}")
        found += regrets[chance][n] <= NEAR
        hours += documents[chance]["cells"][n]["gpu_hours_share"] * total / sum(totals)
    print(f"  chosen without each cell: {hours:.2%} {found}/{len(totals)}:", ", ".join(chosen))


def main() -> None:
    cases, used = open_cases([sys.argv[1]], None, Path("results"))
    every = {f"without its {by}": cells_without(cases, used, by) for by in GROUPS}
    every["profile as it is"] = cells_of(cases, used)
    for name, cells in every.items():
        parts = halves(cells)
        print(f"{name}: batch {', '.join(map(str, BATCHES))}; halves, batch 1 and 8: hours, found, worst")
        documents = {}
        for chance in CHANCES:
            whole = [replayed(cells, chance, batch) for batch in BATCHES]
            documents[chance] = whole[0]
            row = [*map(text, whole), *(text(replayed(parts, chance, batch)) for batch in BATCHES[:2])]
            print(f"  {chance:<5g}", " | ".join(row), flush=True)
        choose(cells, documents)


if __name__ == "__main__":
    main()
