"use strict";
// The standing of the shown runs of a cell, by the rule of standing.py: which is the best, and which are as good.

const RATE = "tokens_per_s_per_gpu";
const runsOf = pageData.cells.map(() => []); // the row that stands for each run of a cell, the best first
const repeatsOf = pageData.cells.map(() => []); // the rows of all repeats of these runs
for (let row = 0; row < numRows; row++) {
  const cell = value("cell", row);
  if (cell === null) continue;
  if (value("rank", row) !== null) runsOf[cell].push(row);
  if (value("is_final", row)) repeatsOf[cell].push(row);
}

// The tier of the state of a row among those of a cell: 0 is ok, 1 a failure, 2 is to come, 3 is skipped; a later
// version may have more.
function tierOf(row) {
  return pageData.tiers[value("state", row)] ?? 1;
}

function isOk(row) {
  return value("status", row) === pageData.names.ok;
}

// Whether the measurement of an ok row is suspect.
function isSuspect(row) {
  return isOk(row) && value("suspect", row) !== null;
}

// Whether a row competes where no row is suspect: it is ok, has a rate and was not stopped as slower.
function isMeasured(row) {
  return isOk(row) && value("stopped", row) !== pageData.names.slower && value(RATE, row) !== null;
}

function mayWin(row) {
  return isMeasured(row) && value("suspect", row) === null;
}

// Whether parts of steps alone were measured.
function isPartial(row) {
  return value("measured_gas", row) !== null;
}

// How an ok row was screened, which chooses contenders, but does not say which one is the best; null if in full.
function screening(row) {
  if (!isOk(row) || !value("screened", row)) return null;
  return isPartial(row) ? pageData.names.in_parts : pageData.names.few_steps;
}

// How each ok row was measured, for the filters of a page on which some rows were only screened.
if (allRows.some(screening))
  columns.measured = allRows.map((row) => (isOk(row) ? (screening(row) ?? "in full") : null));

// Half the interval of the time of a whole step by the turns of parts alone; null where it is unknown.
function partsInterval(row) {
  return value("parts_ci95_rel", row);
}

// The ratio of whole steps to parts of a run, the median of its starts that have measured both, with its interval.
// It is 1 for a run that was measured by whole steps alone, and null where no start has measured both.
function wholeByParts(rows) {
  const partsTime = (row) => value("parts_step_time_s", row);
  if (!rows.some((row) => isPartial(row) || partsTime(row) !== null)) return { ratio: 1, interval: 0 };
  const both = rows.filter(
    (row) => !isPartial(row) && partsTime(row) !== null && partsInterval(row) !== null,
  );
  if (!both.length) return null;
  return {
    ratio: median(both.map((row) => value("step_time_s", row) / partsTime(row))),
    interval: median(
      both.map((row) => Math.hypot(value("step_time_ci95_rel", row) ?? 0, partsInterval(row))),
    ),
  };
}

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b),
    middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// Whether all were measured beside one control layout, in one environment, so that their ratios to it are compared.
function besideOneControl(competingRows) {
  const controls = new Set(competingRows.map((row) => value("control", row)));
  const environments = new Set(
    competingRows.map((row) => value("contender", row).slice(value("run_id", row).length)).filter(Boolean),
  );
  return (
    controls.size === 1 &&
    environments.size <= 1 &&
    competingRows.every((row) => value("control_ratio", row) !== null)
  );
}

// The shown runs of a cell in the order of their standing: the row of each, whether it competes, is the best, or is as
// good.
function standings(cell, isShown) {
  const rowByContender = new Map(runsOf[cell].filter(isShown).map((row) => [value("contender", row), row]));
  // A failed row stands for a run whose start in full has failed, although parts or few steps of it were ok.
  const standsAsOk = (row) => row !== undefined && isOk(row);
  const measured = repeatsOf[cell].filter(
    (row) => standsAsOk(rowByContender.get(value("contender", row))) && isMeasured(row),
  );
  const trusted = measured.filter(mayWin),
    competing = trusted.length ? trusted : measured;
  const comparedColumn = besideOneControl(competing) ? "control_ratio" : RATE;
  // A predicted run counts with its rate times the probability that it fits, as expected_rate in candidate.py.
  const comparedValue = (row) =>
    pageData.cells[cell].predicted
      ? value(RATE, row) * (1 - value("p_oom", row))
      : value(comparedColumn, row);
  const relativeInterval = (row) => value("step_time_ci95_rel", row) ?? 0,
    allocationOf = (row) => value("allocation_number", row);
  const controlRows =
    comparedColumn === RATE ? [] : competing.filter((row) => value("run_id", row) === value("control", row));
  const controlInterval = new Map(
    [...Map.groupBy(controlRows, allocationOf)].map(([allocation, rows]) => [
      allocation,
      median(rows.map(relativeInterval)),
    ]),
  );
  const controlWidth = (row) =>
    comparedColumn === RATE
      ? 0
      : (value("control_ci95_rel", row) ?? controlInterval.get(allocationOf(row)) ?? 0);
  const measuredByContender = Map.groupBy(competing, (row) => value("contender", row));
  const start = (repeat) => ({
    number: comparedValue(repeat),
    width: Math.hypot(relativeInterval(repeat), controlWidth(repeat)),
  });
  // The value and interval of each repeat that screened a run which was measured in full, as if whole steps had been
  // measured in its start.
  const otherStarts = (repeats) => {
    const screened = repeats.filter(screening),
      byFewSteps = screened.filter((row) => !isPartial(row)).map(start);
    if (screened.length === repeats.length) return [];
    const own = wholeByParts(repeats),
      contender = value("contender", repeats[0]),
      environment = contender.slice(value("run_id", repeats[0]).length),
      controlRows = measuredByContender.get(`${value("control", repeats[0])}${environment}`),
      ofControl =
        comparedColumn === RATE ? { ratio: 1, interval: 0 } : controlRows && wholeByParts(controlRows);
    if (!own || !ofControl) return byFewSteps;
    return byFewSteps.concat(
      screened
        .filter((row) => isPartial(row) && partsInterval(row) !== null)
        .map((row) => ({
          number: (comparedValue(row) * ofControl.ratio) / own.ratio,
          width: Math.hypot(partsInterval(row), own.interval, ofControl.interval, controlWidth(row)),
        })),
    );
  };
  const runs = [...rowByContender].map(([contender, row]) => {
    const measuredRepeats = measuredByContender.get(contender) ?? [],
      fullRepeats = measuredRepeats.filter((repeat) => !screening(repeat)),
      repeats = fullRepeats.length ? fullRepeats : measuredRepeats,
      comparedValues = repeats.map(comparedValue);
    const starts = repeats.map(start).concat(otherStarts(measuredRepeats));
    const medianValue = comparedValues.length ? median(comparedValues) : comparedValue(row);
    const interval = comparedValues.length
      ? [
          Math.min(...starts.map(({ number, width }) => number / (1 + width))),
          Math.max(...starts.map(({ number, width }) => number / Math.max(0, 1 - width))),
        ]
      : null;
    return {
      row,
      comparedColumn,
      run: value("run_id", row),
      value: medianValue ?? -Infinity,
      interval,
      screened: repeats.length > 0 && !fullRepeats.length,
      tier: tierOf(row),
    };
  });
  const byValue = (a, b) => b.value - a.value || (a.run < b.run ? -1 : a.run > b.run ? 1 : 0);
  const [best] = runs.filter(({ interval, screened }) => interval && !screened).sort(byValue);
  for (const run of runs) {
    run.best = run === best;
    run.asGood =
      !run.best && !run.screened && run.interval !== null && run.interval[1] >= best.interval[0];
    if (run.best || run.asGood) run.tier = -1;
  }
  return runs.sort((a, b) => a.tier - b.tier || byValue(a, b));
}
