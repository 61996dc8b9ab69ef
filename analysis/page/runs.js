"use strict";
// The ranked layouts of one cell, and everything about one of them.

const MAX_RANKS = 8; // ranks of a failure that are shown; `sweep show` has all
const FIRST_ROWS = 25; // rows of a table before "show all"
const RUN_COLUMNS = {
  layout: "layout",
  environment: "environment",
  place: "status",
  mfu: headingOf("mfu"),
  tokens_per_s_per_gpu: headingOf("tokens_per_s_per_gpu"),
  control_ratio: "speed / control",
  step_time_s: "step time",
  predicted_step_time_s: "predicted step time",
  memory: "peak memory",
  predicted_peak_mem_bytes: "predicted memory",
  p_oom: headingOf("p_oom"),
  why: "reason",
};
const CELL_CLASSES = { layout: "layout", environment: "words", place: "word", why: "words" }; // others are numbers
const ATTEMPT_COLUMNS = {
  repeat: "repeat",
  attempt: "attempt",
  state: "status",
  cause: "cause",
  step_time_s: "step time",
  duration_s: "duration",
  gpu_hours: headingOf("gpu_hours"),
  hostnames: "hosts",
  job_id: "job",
  allocation: "allocation",
  reason: "reason",
};

// The text of a column of RUN_COLUMNS or ATTEMPT_COLUMNS; a step time has its 95 % interval. `numberOf` gives the
// number of a row or of its run.
function shownText(name, row, numberOf = value) {
  if (name === "memory") return memoryOf(row);
  if (name === "place") {
    const isSlower = value("stopped", row) === pageData.names.slower,
      mark = isSlower ? "slower" : isSuspect(row) ? "suspect" : null;
    return [mark, screening(row)].filter(Boolean).join(", ") || value("state", row);
  }
  if (name === "why") return [value("suspect", row), value("reason", row)].filter(Boolean).join("; ");
  const valueText = text(name, numberOf(name, row)),
    relativeInterval = numberOf("step_time_ci95_rel", row);
  if (name === "mfu" && valueText) return valueText + (pageData.cells[value("cell", row)]?.of_peak ?? "");
  if (name === "predicted_step_time_s" && valueText && value("extrapolated", row))
    return `${valueText} (extrapolated)`;
  return name === "step_time_s" && valueText && relativeInterval !== null
    ? `${valueText} ${halfWidth("step_time_ci95_rel", relativeInterval)}`
    : valueText;
}

function nonemptyColumns(columnLabels, candidateRows) {
  return Object.keys(columnLabels).filter((name) => candidateRows.some((row) => shownText(name, row) !== ""));
}

// The table of the shown runs of a cell in the order of their standing; a button in each row opens the details of its
// run.
function runsTable(standingRuns, showsAll, openContender, onChoose, onShowAll) {
  const markByRow = new Map(
      standingRuns.map(({ row, best, asGood }) => [row, best ? "best" : asGood ? "as good" : null]),
    ),
    rankedRows = [...markByRow.keys()];
  const isByControl = standingRuns.some(({ comparedColumn }) => comparedColumn === "control_ratio");
  const shownColumns = nonemptyColumns(RUN_COLUMNS, rankedRows).filter(
      (name) => name !== "control_ratio" || isByControl,
    ),
    opensBeyond = rankedRows.slice(FIRST_ROWS).some((row) => value("contender", row) === openContender);
  const shownRanked = showsAll || opensBeyond ? rankedRows : rankedRows.slice(0, FIRST_ROWS);
  const tableRows = shownRanked.flatMap((row) => {
    const contender = value("contender", row),
      open = contender === openContender;
    const button = element(
      "button",
      {
        type: "button",
        "aria-expanded": String(open),
        "data-run": contender,
        onclick: () => onChoose(open ? null : contender),
      },
      `${value("rank", row)}`,
    );
    const rowElement = element(
      "tr",
      { class: mayWin(row) ? null : "weak" },
      element("th", { scope: "row" }, button),
    );
    for (const name of shownColumns)
      rowElement.append(
        element(
          "td",
          { class: CELL_CLASSES[name] ?? "number" },
          (name === "place" && markByRow.get(row)) || shownText(name, row, ofRun),
        ),
      );
    return open
      ? [
          rowElement,
          element(
            "tr",
            {},
            element("td", { colspan: shownColumns.length + 1, class: "about-run" }, aboutRun(row)),
          ),
        ]
      : [rowElement];
  });
  const runsElement = table(
    "Layouts in ranking order; select a rank to see the details of its layout",
    ["rank", ...shownColumns.map((name) => RUN_COLUMNS[name])],
    tableRows,
  );
  if (shownRanked.length < rankedRows.length)
    runsElement.append(
      element("button", { type: "button", onclick: onShowAll }, `Show all ${grouped(rankedRows.length)}`),
    );
  return runsElement;
}

function aboutRun(row) {
  const runId = value("run_id", row),
    contender = value("contender", row);
  const attempts = allRows
    .filter((attempt) => value("contender", attempt) === contender)
    .sort((a, b) => value("repeat", a) - value("repeat", b) || value("attempt", a) - value("attempt", b));
  const attemptColumns = nonemptyColumns(ATTEMPT_COLUMNS, attempts);
  const attemptsTable = isPlan
    ? null
    : table(
        "Attempts",
        attemptColumns.map((name) => ATTEMPT_COLUMNS[name]),
        attempts.map((attempt) => attemptColumns.map((name) => shownText(name, attempt))),
      );
  const parts = partsOf(row).map(([part, bytes]) => [part, memory(bytes)]);
  const partsTable = parts.length
    ? table(
        "Memory of the rank that needs the most, as predicted by this version of ultrabench",
        ["part", "memory"],
        parts,
      )
    : null;
  const extrapolated = value("extrapolated", row),
    extrapolationNote = extrapolated
      ? element(
          "p",
          {},
          `Extrapolated: the profile was fitted to runs without ${extrapolated}; the fitted values are in brackets.`,
        )
      : null;
  return element(
    "div",
    {},
    element("h3", {}, `Run ${runId}`),
    commands(row),
    attemptsTable,
    ...attempts.map(evidenceOf),
    partsTable,
    extrapolationNote,
    allNumbers(row),
  );
}

// The names and bytes of the parts of the predicted memory of a row; empty where they are unknown.
function partsOf(row) {
  return pageData.parts
    .map((part) => [part, value(`predicted_${part}_bytes`, row)])
    .filter(([, bytes]) => bytes);
}

// How the ranks of a failed attempt ended, those first that nobody killed; null for an attempt without evidence.
function evidenceOf(row) {
  const evidence = JSON.parse(value("evidence", row) ?? "{}"),
    ranks = evidence.ranks ?? [];
  const rankLines = [...ranks]
    .sort((a, b) => Boolean(a.killed_by_us) - Boolean(b.killed_by_us))
    .slice(0, MAX_RANKS)
    .map((rank) =>
      [
        rank.rank,
        rank.phase,
        rank.killed_by_us ? "killed by ultrabench" : rank.code,
        rank.error ?? rank.last_line,
      ].map((cell) => String(cell ?? "")),
    );
  if (evidence.hang_cause) rankLines.unshift(["all", "", "hang", evidence.hang_cause]);
  return rankLines.length
    ? table(
        `Evidence of attempt ${value("repeat", row)}.${value("attempt", row)}`,
        ["rank", "phase", "exit", "last output"],
        rankLines,
      )
    : null;
}

// The commands that show this run, or plan, predict and run its layout again.
function commands(row) {
  const runId = value("run_id", row),
    commandLines = [];
  if (value("sweep", row) !== null && value("source", row) === null) {
    commandLines.push(["show this run", `ultrabench sweep show ${runId} --sweep ${value("sweep", row)}`]);
    commandLines.push(["show its log", `ultrabench sweep logs ${runId} --sweep ${value("sweep", row)}`]);
  }
  commandLines.push(["predict this layout", `ultrabench predict ${value("predict", row)}`]);
  commandLines.push([
    isPlan ? "run this layout" : "run this layout again",
    `ultrabench sweep launch name=again ${value("launch", row)}`,
  ]);
  return element(
    "dl",
    {},
    ...commandLines.flatMap(([purpose, command]) => [
      element("dt", {}, purpose),
      element("dd", {}, element("code", {}, command)),
    ]),
  );
}

// Every known column of a row with its meaning.
function allNumbers(row) {
  const lines = Object.values(pageData.schema)
    .flat()
    .filter(([name]) => value(name, row) !== null)
    .map(([name, , , , meaning]) => [name, text(name, value(name, row)), meaning]);
  return element(
    "details",
    {},
    element("summary", {}, "All columns"),
    table("All columns of this row", ["column", "value", "meaning"], lines),
  );
}
