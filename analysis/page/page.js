"use strict";
// The state of the page, which is its filters, the open cell and the open run. It stands in the fragment of the URL.

const FILTERS = [
  "model",
  "nodes",
  ...pageData.axes,
  "seq_len",
  "gbs",
  "hardware",
  "kernel",
  "kernel_version",
  "precision",
  "routing",
  "state",
  "measured",
  "cause",
  "doubt",
  "sweep",
  "source",
].filter((name) => distinct(name).length > 1);
const COLUMN_LABELS = {
  state: "status",
  doubt: "suspect",
  zero_stage: "ZeRO stage",
  kernel_version: "kernel version",
};
const MAX_VALUES = 12; // values of a column that the origin of the rows names
const state = { filters: {}, cell: null, run: null, all: false, x: X_COLUMNS[0], y: Y_MEASURES[0] };
const form = document.getElementById("filters");
const buttons = buildHeatmap(document.getElementById("heatmap"), openCell);

function nameOf(column) {
  return COLUMN_LABELS[column] ?? column;
}

// The name of a cell in a link: its model and nodes, and its place among cells that share both.
function cellName(cell) {
  const { model, nodes } = pageData.cells[cell];
  const similarCells = pageData.cells
    .map((otherCell, index) => index)
    .filter((index) => pageData.cells[index].model === model && pageData.cells[index].nodes === nodes);
  return similarCells.length > 1
    ? `${model},${nodes},${similarCells.indexOf(cell) + 1}`
    : `${model},${nodes}`;
}

// Reads the fragment; returns the names and values that this page does not have.
function readFragment() {
  const fragment = new URLSearchParams(location.hash.slice(1)),
    unknown = [];
  Object.assign(state, {
    filters: {},
    cell: null,
    run: fragment.get("run"),
    all: false,
    x: X_COLUMNS[0],
    y: Y_MEASURES[0],
  });
  for (const [key, valueText] of fragment) {
    const column = key === COLUMN_LABELS.state ? "state" : key;
    const filterValue = distinct(column).find((v) => String(v) === valueText);
    if (FILTERS.includes(column) && filterValue !== undefined) state.filters[column] = filterValue;
    else if (column === "cell") state.cell = pageData.cells.findIndex((_, n) => cellName(n) === valueText);
    else if (column === "x" && X_COLUMNS.includes(valueText)) state.x = valueText;
    else if (column === "y" && Y_MEASURES.includes(valueText)) state.y = valueText;
    else if (column !== "run" && location.hash.includes("=")) unknown.push(`${column}=${valueText}`);
  }
  if (state.cell < 0) state.cell = null;
  closeExcluded();
  if (fragment.has("cell") && state.cell === null) unknown.push(`cell=${fragment.get("cell")}`);
  return unknown;
}

function writeFragment(addsHistory) {
  const fragment = new URLSearchParams(
    Object.entries(state.filters).map(([name, filterValue]) => [
      name === "state" ? COLUMN_LABELS.state : name,
      filterValue,
    ]),
  );
  if (state.cell !== null) fragment.set("cell", cellName(state.cell));
  if (state.run !== null) fragment.set("run", state.run);
  if (state.x !== X_COLUMNS[0]) fragment.set("x", state.x);
  if (state.y !== Y_MEASURES[0]) fragment.set("y", state.y);
  history[addsHistory ? "pushState" : "replaceState"](null, "", `#${fragment}`);
}

// Closes the cell and the run that the filters exclude.
function closeExcluded() {
  const shown = state.cell === null ? [] : runsOf[state.cell].filter(isShown);
  if (!shown.some((row) => value("contender", row) === state.run)) state.run = null;
  if (!shown.length) state.cell = null;
}

function isShown(row) {
  return Object.entries(state.filters).every(([name, filterValue]) => value(name, row) === filterValue);
}

function shownRows() {
  return allRows.filter(isShown);
}

// Opens a row that is chosen in a figure.
function openRow(row) {
  Object.assign(state, { cell: value("cell", row), run: value("contender", row), all: false });
  writeFragment(true);
  drawRuns();
  document.querySelector(`[data-run="${state.run}"]`)?.focus();
}

function openCell(cell) {
  Object.assign(state, { cell: state.cell === cell ? null : cell, run: null, all: false });
  writeFragment(true);
  drawRuns();
  if (state.cell !== null) document.getElementById("runs-title").focus();
}

function chooseRun(run) {
  state.run = run;
  writeFragment(true);
  drawRuns();
  document.querySelector(`[data-run="${run}"]`)?.focus();
}

function drawRuns() {
  buttons.forEach((button, cell) => button.setAttribute("aria-expanded", String(cell === state.cell)));
  document.getElementById("runs").hidden = state.cell === null;
  if (state.cell === null) return;
  const { model, place, reason, ranked_by: rankedColumn } = pageData.cells[state.cell],
    cellRows = runsOf[state.cell],
    runs = standings(state.cell, isShown);
  // Filters may leave runs with several controls.
  const rankedBy = runs[0]?.best && !isPlan ? runs[0].comparedColumn : rankedColumn;
  document.getElementById("runs-title").textContent = `Layouts of ${model} on ${place}`;
  const countText = `${grouped(runs.length)} of ${counted(cellRows.length, "layout")}`;
  document.getElementById("runs-about").textContent =
    `${countText}${rankedBy ? `, ranked by ${RUN_COLUMNS[rankedBy] ?? rankedBy}` : ""}. ${reason ?? ""}`;
  const onShowAll = () => {
    state.all = true;
    drawRuns();
  };
  document
    .getElementById("runs-table")
    .replaceChildren(runsTable(runs, state.all, state.run, chooseRun, onShowAll));
}

function draw(unknownParts = []) {
  performance.mark("draw-begin");
  for (const name of FILTERS) form.elements[name].value = String(state.filters[name] ?? "");
  for (const name of ["x", "y"]) document.getElementById("axes").elements[name].value = state[name];
  const visibleRows = shownRows();
  buttons.forEach((button, cell) => fillCell(button, cell, standings(cell, isShown)));
  drawRuns();
  drawHours(visibleRows);
  const linkWarning = unknownParts.length
    ? ` The link selects ${unknownParts.join(", ")}, which this page does not contain.`
    : "";
  document.getElementById("count").textContent =
    `${grouped(visibleRows.length)} of ${counted(numRows, "row")} shown.${linkWarning}`;
  if (window.Bokeh) figuresChanged();
  performance.measure("draw", "draw-begin");
}

// Attempts, and GPU hours where they are known, by status.
function drawHours(selectedRows) {
  const sumByStatus = new Map();
  let numUnknown = 0;
  for (const row of selectedRows) {
    if (value("attempt", row) === null) continue;
    const sumOfStatus = sumByStatus.get(value("state", row)) ?? { numAttempts: 0, hours: null },
      hours = value("gpu_hours", row);
    numUnknown += hours === null;
    sumByStatus.set(value("state", row), {
      numAttempts: sumOfStatus.numAttempts + 1,
      hours: hours === null ? sumOfStatus.hours : sumOfStatus.hours + hours,
    });
  }
  const hasHours = "gpu_hours" in columns,
    totalHours = [...sumByStatus.values()].reduce((sum, { hours }) => sum + hours, 0);
  const tableRows = [...sumByStatus]
    .sort(([, a], [, b]) => b.hours - a.hours || b.numAttempts - a.numAttempts)
    .map(([status, { numAttempts, hours }]) =>
      hasHours
        ? [
            status,
            grouped(numAttempts),
            hours === null ? "unknown" : bareText("gpu_hours", hours),
            hours === null ? "" : percent(hours / (totalHours || 1)),
          ]
        : [status, grouped(numAttempts)],
    );
  const heading = headingOf("gpu_hours");
  const headings = ["status", "attempts", ...(hasHours ? [heading, `share of ${heading}`] : [])];
  const unknownText = numUnknown ? `; unknown for ${counted(numUnknown, "attempt")}` : "";
  const note = hasHours
    ? `${text("gpu_hours", totalHours)} in total${unknownText}.`
    : `These results have no ${heading}.`;
  document
    .getElementById("hours")
    .replaceChildren(
      table("Attempts of the shown rows by status", headings, tableRows),
      element("p", {}, note),
    );
}

function buildFilters() {
  for (const name of FILTERS) {
    const options = distinct(name).map((v) => element("option", { value: v }, text(name, v)));
    const select = element(
      "select",
      { name, onchange: filterChanged },
      element("option", { value: "" }, "all"),
      ...options,
    );
    document.getElementById("choices").append(element("label", {}, nameOf(name), select));
  }
  form.addEventListener("reset", () => {
    state.filters = {};
    writeFragment(false);
    draw();
  });
}

function filterChanged(event) {
  const { name, value: chosenText } = event.target;
  delete state.filters[name];
  if (chosenText !== "") state.filters[name] = distinct(name).find((v) => String(v) === chosenText);
  closeExcluded();
  writeFragment(false);
  draw();
}

function figureChanged({ target }) {
  state[target.name] = target.value;
  writeFragment(false);
  figuresChanged();
}

// The sentences that explain the cells of the heatmap.
function howToRead() {
  const hasMfu = "mfu" in pageData.columns;
  const speedName = headingOf(hasMfu ? "mfu" : RATE);
  const cellText = isPlan
    ? `the layout predicted to be fastest: its ${speedName} and peak memory, then the predicted outcomes of all layouts`
    : `the fastest layout, a suspect one only in a cell without other results: its ${speedName}, ` +
      "the interval of its step time if that is wider than its target, its peak memory, " +
      "then the outcomes of all layouts";
  const sentences = [`Each cell shows ${cellText}.`];
  if (hasMfu) {
    const endText = `${pageData.mfu_end} ${unitOf("mfu").axis}`;
    sentences.push(`Colours show the ${speedName}, from purple (0) to yellow (${endText}).`);
  }
  sentences.push("Select a cell to list its layouts.");
  if (pageData.formula) sentences.push(`${pageData.formula}.`);
  return sentences.join(" ");
}

// What no filter changes: sections of studies, rejected layouts, the origin of the rows and the meaning of the columns.
function buildRest() {
  const privacyNote = pageData.public
    ? " Host names, paths, users, accounts and all free texts are removed."
    : "";
  const numRejected = pageData.rejected.reduce((sum, rejection) => sum + rejection.number, 0);
  const numByKernel = pageData.rejected.reduce(
    (sum, rejection) => sum + (rejection.rule === "kernel" ? rejection.number : 0),
    0,
  );
  const reasonsText = `${grouped(numRejected - numByKernel)} by rules, ${grouped(numByKernel)} by the kernel`;
  const rejectedText = numRejected ? `, and ${counted(numRejected, "layout")} rejected: ${reasonsText}` : "";
  document.getElementById("about").textContent =
    `${pageData.notice}${counted(numRows, "row")}${rejectedText}. ${pageData.made_with}${privacyNote}`;
  document.getElementById("how").textContent = pageData.cells.length
    ? howToRead()
    : "No row trains a model, so there is nothing to rank.";
  const sections = pageData.sections.map(({ title, caption, heads, rows, notes }, index) => {
    const id = `section-${index}`;
    const tables = rows.length ? [table(caption, heads, rows)] : [];
    const paragraphs = notes.map((note) => element("p", {}, note));
    return element("section", { "aria-labelledby": id }, element("h2", { id }, title), ...tables, ...paragraphs);
  });
  document.getElementById("sections").append(...sections);
  const rejected = pageData.rejected.map((rejection) => [
    rejection.model ?? "",
    text("nodes", rejection.nodes),
    grouped(rejection.number),
    rejection.rule ?? "",
    rejection.example ?? "",
  ]);
  document
    .getElementById("rejected")
    .append(
      rejected.length
        ? table("By model, nodes and rule", ["model", "nodes", "layouts", "rule", "for example"], rejected)
        : element("p", {}, "The results list no rejected layouts."),
    );
  const origin = [
    "source",
    "sweep",
    "cluster",
    "hardware",
    "gpu_name",
    "kernel",
    "kernel_version",
    "kernel_digest",
    "precision",
    "flops_formula",
    "peak_flops_per_s",
    "peak_source",
    "git_commit",
    "torch_version",
    "cuda_version",
    "nccl_version",
    "driver_version",
  ];
  const originRows = origin
    .filter((name) => distinct(name).length)
    .map((name) => [
      name,
      distinct(name)
        .slice(0, MAX_VALUES)
        .map((v) => text(name, v))
        .join(", "),
    ]);
  document.getElementById("origin").append(table("Values in the rows", ["column", "values"], originRows));
  const paragraphs = pageData.ranking.map((paragraph) =>
    element("p", {}, ...paragraph.split("`").map((part, n) => (n % 2 ? element("code", {}, part) : part))),
  );
  document
    .getElementById("columns")
    .append(element("details", {}, element("summary", {}, "Rows and ranking"), ...paragraphs));
  for (const [group, columnRows] of Object.entries(pageData.schema)) {
    if (!columnRows.length) continue;
    document
      .getElementById("columns")
      .append(
        element(
          "details",
          {},
          element("summary", {}, group),
          table(group, ["column", "type", "unit", "better", "meaning"], columnRows),
        ),
      );
  }
}

function start() {
  if (isPlan) for (const id of ["hours", "rejected"]) document.getElementById(id).parentElement.hidden = true;
  buildFilters();
  buildRest();
  buildMemory(document.getElementById("fit"));
  buildFigures(document.getElementById("figures"));
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the fragment keeps the filters
    document.getElementById("best").focus();
  });
  dark.addEventListener("change", () => matchMedia("print").matches || figuresChanged()); // paper is light
  addEventListener("DOMContentLoaded", figuresChanged); // then the scripts of Bokeh have run, too
  const follow = () => {
    const { cell, run } = state;
    draw(readFragment());
    // what had the focus is gone or hidden, so that the browser would begin at the top
    if (!document.activeElement?.offsetParent)
      (document.querySelector(`[data-run="${run}"]`) ?? buttons[cell])?.focus({ preventScroll: true });
  };
  addEventListener("hashchange", follow);
  follow();
}

start();
