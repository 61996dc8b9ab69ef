"use strict";
// The standing of the shown runs of a cell, by the rule of standing.py: which is the best, and which are as good.

const RATE = "tokens_per_s_per_gpu";
const runsOf = held.cells.map(() => []); // the row that stands for each run of a cell, the best first
const repeatsOf = held.cells.map(() => []); // the rows of all repeats of these runs
for (let row = 0; row < rows; row++) {
  const cell = value("cell", row);
  if (cell === null) continue;
  if (value("rank", row) !== null) runsOf[cell].push(row);
  if (value("is_final", row)) repeatsOf[cell].push(row);
}

// The place of the state of a row among those of a cell: 0 is ok, 1 a failure, 2 is to come, 3 is skipped; a later version may have more.
function tierOf(row) {
  return held.tiers[value("state", row)] ?? 1;
}

// Whether the measurement of an ok row is suspect.
function isSuspect(row) {
  return value("status", row) === "ok" && value("suspect", row) !== null;
}

// Whether a row competes where no row is suspect: it is ok, has a rate and was not stopped as slower.
function isMeasured(row) {
  return value("status", row) === "ok" && value("stopped", row) !== "slower_than_best" && value(RATE, row) !== null;
}

function mayWin(row) {
  return isMeasured(row) && value("suspect", row) === null;
}

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Whether all were measured beside one control layout, in one environment, so that their ratios to it are compared.
function besideOneControl(competing) {
  const controls = new Set(competing.map((row) => value("control", row)));
  const environments = new Set(competing.map((row) => value("contender", row).slice(value("run_id", row).length)).filter(Boolean));
  return controls.size === 1 && environments.size <= 1 && competing.every((row) => value("control_ratio", row) !== null);
}

// The shown runs of a cell in the order of their standing: the row of each, whether it competes, is the best, or is as good.
function standings(cell, isShown) {
  const rowOf = new Map(runsOf[cell].filter(isShown).map((row) => [value("contender", row), row]));
  const measured = repeatsOf[cell].filter((row) => rowOf.has(value("contender", row)) && isMeasured(row));
  const trusted = measured.filter(mayWin), competing = trusted.length ? trusted : measured;
  const compared = besideOneControl(competing) ? "control_ratio" : RATE;
  // A predicted run counts with its rate times the probability that it fits, as expected_rate in candidate.py.
  const number = (row) => held.cells[cell].predicted ? value(RATE, row) * (1 - value("p_oom", row)) : value(compared, row);
  const ci = (row) => value("step_time_ci95_rel", row) ?? 0, place = (row) => value("place", row);
  const controlCi = new Map(compared === RATE ? [] : competing.filter((row) => value("run_id", row) === value("control", row)).map((row) => [place(row), ci(row)]));
  const ends = Map.groupBy(competing, (row) => value("contender", row));
  const found = [...rowOf].map(([contender, row]) => {
    const repeats = ends.get(contender) ?? [], reach = (n) => number(n) * Math.hypot(ci(n), controlCi.get(place(n)) ?? 0);
    const known = repeats.length ? median(repeats.map((n) => number(n))) : number(row);
    const interval = repeats.length ? [Math.min(...repeats.map((n) => number(n) - reach(n))), Math.max(...repeats.map((n) => number(n) + reach(n)))] : null;
    return { row, run: value("run_id", row), value: known ?? -Infinity, interval, tier: isSuspect(row) ? 0.5 : tierOf(row) };
  });
  const byValue = (a, b) => b.value - a.value || (a.run < b.run ? -1 : a.run > b.run ? 1 : 0);
  const [best] = found.filter(({ interval }) => interval).sort(byValue);
  for (const run of found) {
    run.best = run === best;
    run.asGood = !run.best && run.interval !== null && run.interval[1] >= best.interval[0];
    if (run.best || run.asGood) run.tier = -1;
  }
  return found.sort((a, b) => a.tier - b.tier || byValue(a, b));
}
