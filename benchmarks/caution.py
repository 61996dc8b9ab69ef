"""The caution of the adaptive search, chosen on some cells of a finished sweep and judged on the others.

`python benchmarks/caution.py FILE.parquet` replays the search with each value of MIN_CHANCE, the chance to be faster at
which a cell goes on. No cell is searched with constants that were fitted to it: the profile is fitted without its
model, and once more without its number of nodes. For each of the two, the table has

- all cells: hours of the exhaustive sweep, cells that end within 2 % of their best, and the largest regret;
- halves: how many random parts of the cells, with a half of their layouts each, end within 2 % of their best, which is
  another layout in most of them;
- the choice: for each cell, the largest MIN_CHANCE with which all other cells end within 2 %,
  and what these choices give; and the largest one with which ENOUGH of the halves of all other cells do.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replay import NEAR, Replay, ReplayedCell, ReplayedRun, cells_of, replay

from ultrabench.analysis.results.cases import Case, open_cases
from ultrabench.analysis.studies.predictions.validate import GROUPS, profiles_without_group, start_profile
from ultrabench.cli.tables import say, warn
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.predict import search
from ultrabench.sweep.predict.profile import Profile

CHANCES = (0.2, 0.1, 0.07, 0.05, 0.04, 0.03, 0.02, 0.01)
BATCHES = (1, 8, 16)
ENOUGH = 0.95
"""Share of halves within NEAR by which a MIN_CHANCE is chosen."""
DRAWS, SEED = 20, 1
"""Random halves of each cell."""
Cells = Mapping[ReplayedCell, Sequence[ReplayedRun]]


def cells_without(cases: Sequence[Case], used: Profile, by: str) -> Cells:
    """The cells, each predicted by a profile that is fitted without its model or its number of nodes."""
    profiles = profiles_without_group(cases, start_profile(used), by)
    group = GROUPS[by]
    cells: dict[ReplayedCell, Sequence[ReplayedRun]] = {}
    for name, profile in profiles.items():
        cells |= cells_of([case for case in cases if group(case) == name], profile)
    return cells


def halves(cells: Cells) -> dict[ReplayedCell, list[dict[float, bool]]]:
    """For each cell what `near_by_chance` returns for random halves of it, of those in which any layout works."""
    draw, max_p_oom = random.Random(SEED), load_config().max_p_oom
    ends: dict[ReplayedCell, list[dict[float, bool]]] = {}
    for cell, runs in cells.items():
        parts = [[run for run in runs if draw.random() < 0.5] for _ in range(DRAWS)]
        ends[cell] = [
            near_by_chance(part, max_p_oom) for part in parts if any(run.step_time_s for run in part)
        ]
    return ends


def near_by_chance(runs: Sequence[ReplayedRun], max_p_oom: float) -> dict[float, bool]:
    """MIN_CHANCE -> whether a search ends within NEAR of the best run, if it makes one run after the other.

    It is replayed once, since MIN_CHANCE does not change the order of its runs but only where it ends.
    """
    cell, best_by_chance = Replay(runs, max_p_oom), dict[float, float]()
    search.MIN_CHANCE = min(CHANCES)
    while proposed := search.propose(runs, tried := cell.tried()):
        beliefs = search.beliefs_of(runs, tried)
        untried = [i for i, r in enumerate(runs) if r.run_id not in tried.begun_ids and cell.may_fit(r)]
        chances = beliefs.p_better(cell.best_s)
        promising = max(chances[i] for i in untried if beliefs.p_ooms[i] <= tried.max_p_oom)
        if tried.times_s:
            best_by_chance |= {c: cell.best_s for c in CHANCES if c > promising and c not in best_by_chance}
        cell.make(proposed)
    best_s = min(run.step_time_s for run in runs if run.step_time_s)
    return {c: best_by_chance.get(c, cell.best_s) / best_s - 1 <= NEAR for c in CHANCES}


def replayed(cells: Cells, chance: float, batch: int) -> dict[str, Any]:
    search.MIN_CHANCE = chance
    return replay(cells, "adaptive", batch, load_config().max_p_oom)


def text(document: Mapping[str, Any]) -> str:
    regrets = [cell["regret"] for cell in document["cells"]]
    near = sum(regret is not None and regret <= NEAR for regret in regrets)
    worst = "none" if None in regrets else f"{max(regrets):.1%}"
    return f"{document['gpu_hours_share']:7.2%} {near:4}/{len(regrets)} {worst:>6}"


def choose(
    cells: Cells,
    documents: Mapping[float, Mapping[str, Any]],
    parts: Mapping[ReplayedCell, list[dict[float, bool]]] | None,
) -> None:
    """Prints the MIN_CHANCE that the other cells choose for each cell, and what these choices give together.

    Args:
        parts: the halves of the cells, if these choose.
    """
    regrets = {c: [cell["regret"] or 0.0 for cell in d["cells"]] for c, d in documents.items()}
    totals = [sum(run.cost_gpu_s() for run in runs) for runs in cells.values()]
    chosen, num_found, hours, found_halves = list[str](), 0, 0.0, list[bool]()
    for n, (cell, total) in enumerate(zip(cells, totals, strict=True)):
        if parts is None:
            good = [c for c in CHANCES if all(r <= NEAR for m, r in enumerate(regrets[c]) if m != n)]
        else:
            others = [half for key, of_cell in parts.items() if key != cell for half in of_cell]
            good = [c for c in CHANCES if sum(half[c] for half in others) >= ENOUGH * len(others)]
            found_halves += [half[max(good, default=min(CHANCES))] for half in parts[cell]]
        chance = max(good, default=min(CHANCES))
        chosen.append(f"{cell.model} {cell.gpus}: {chance:g}")
        num_found += regrets[chance][n] <= NEAR
        hours += documents[chance]["cells"][n]["gpu_hours_share"] * total / sum(totals)
    of_halves = f", {sum(found_halves)}/{len(found_halves)} halves" if found_halves else ""
    by = "chosen by the cells but it" if parts is None else "chosen by the halves of the cells but it"
    print(f"  {by}: {hours:.2%} {num_found}/{len(totals)}{of_halves}:", ", ".join(chosen))


def main() -> None:
    cases, used = open_cases([sys.argv[1]], None, Path("results"), say, warn)
    cells_by_name = {f"without its {by}": cells_without(cases, used, by) for by in GROUPS}
    cells_by_name["profile as it is"] = cells_of(cases, used)
    for name, cells in cells_by_name.items():
        parts = halves(cells)
        number = sum(map(len, parts.values()))
        print(f"{name}: batch {', '.join(map(str, BATCHES))}: hours, found, worst; halves found with batch 1")
        documents = {}
        for chance in CHANCES:
            whole = [replayed(cells, chance, batch) for batch in BATCHES]
            documents[chance] = whole[0]
            near = sum(half[chance] for of_cell in parts.values() for half in of_cell)
            print(f"  {chance:<5g}", " | ".join([*map(text, whole), f"{near}/{number}"]), flush=True)
        for chooses in (None, parts):
            choose(cells, documents, chooses)


if __name__ == "__main__":
    main()
