"use strict";
// The state of the page, which is its filters, the open cell and the open run. It stands in the fragment of the URL.

const FILTERS = ["model", "nodes", ...held.axes, "seq_len", "gbs", "hardware", "kernel", "kernel_version", "precision", "routing", "state", "cause", "doubt", "sweep", "source"].filter((name) => distinct(name).length > 1);
const NAMES = { state: "status", doubt: "suspect", zero_stage: "ZeRO stage", kernel_version: "kernel version" };
const MOST_VALUES = 12; // values of a column that the origin of the rows names
const state = { filters: {}, cell: null, run: null, all: false, x: ACROSS[0], y: UPWARDS[0] };
const form = document.getElementById("filters");
const buttons = buildHeatmap(document.getElementById("heatmap"), openCell);

function nameOf(column) {
  return NAMES[column] ?? column;
}

// The name of a cell in a link: its model and nodes, and its place among cells that share both.
function cellName(cell) {
  const { model, nodes } = held.cells[cell];
  const alike = held.cells.map((c, n) => n).filter((n) => held.cells[n].model === model && held.cells[n].nodes === nodes);
  return alike.length > 1 ? `${model},${nodes},${alike.indexOf(cell) + 1}` : `${model},${nodes}`;
}

// Reads the fragment; returns the names and values that this page does not have.
function readFragment() {
  const given = new URLSearchParams(location.hash.slice(1)), unknown = [];
  Object.assign(state, { filters: {}, cell: null, run: given.get("run"), all: false, x: ACROSS[0], y: UPWARDS[0] });
  for (const [told, wanted] of given) {
    const name = told === NAMES.state ? "state" : told;
    const found = distinct(name).find((v) => String(v) === wanted);
    if (FILTERS.includes(name) && found !== undefined) state.filters[name] = found;
    else if (name === "cell") state.cell = held.cells.findIndex((_, n) => cellName(n) === wanted);
    else if (name === "x" && ACROSS.includes(wanted)) state.x = wanted;
    else if (name === "y" && UPWARDS.includes(wanted)) state.y = wanted;
    else if (name !== "run" && location.hash.includes("=")) unknown.push(`${name}=${wanted}`);
  }
  if (state.cell < 0) state.cell = null;
  closeExcluded();
  if (given.has("cell") && state.cell === null) unknown.push(`cell=${given.get("cell")}`);
  return unknown;
}

function writeFragment(isStep) {
  const told = new URLSearchParams(Object.entries(state.filters).map(([name, wanted]) => [name === "state" ? NAMES.state : name, wanted]));
  if (state.cell !== null) told.set("cell", cellName(state.cell));
  if (state.run !== null) told.set("run", state.run);
  if (state.x !== ACROSS[0]) told.set("x", state.x);
  if (state.y !== UPWARDS[0]) told.set("y", state.y);
  history[isStep ? "pushState" : "replaceState"](null, "", `#${told}`);
}

// Closes the cell and the run that the filters exclude.
function closeExcluded() {
  const shown = state.cell === null ? [] : runsOf[state.cell].filter(isShown);
  if (!shown.some((row) => value("contender", row) === state.run)) state.run = null;
  if (!shown.length) state.cell = null;
}

function isShown(row) {
  return Object.entries(state.filters).every(([name, wanted]) => value(name, row) === wanted);
}

function shownRows() {
  return [...Array(rows).keys()].filter(isShown);
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
  const { model, nodes, reason, ranked_by: by } = held.cells[state.cell], all = runsOf[state.cell], found = standings(state.cell, isShown);
  document.getElementById("runs-title").textContent = `Layouts of ${model} on ${counted(nodes, "node")}`;
  const some = `${grouped(found.length)} of ${counted(all.length, "layout")}`;
  document.getElementById("runs-about").textContent = `${some}${by ? `, ranked by ${RUN_COLUMNS[by] ?? by}` : ""}. ${reason ?? ""}`;
  const showAll = () => { state.all = true; drawRuns(); };
  document.getElementById("runs-table").replaceChildren(runsTable(found, state.all, state.run, chooseRun, showAll));
}

function draw(unknown = []) {
  performance.mark("draw-begin");
  for (const name of FILTERS) form.elements[name].value = String(state.filters[name] ?? "");
  for (const name of ["x", "y"]) document.getElementById("axes").elements[name].value = state[name];
  const shown = shownRows();
  buttons.forEach((button, cell) => fillCell(button, cell, standings(cell, isShown)));
  drawRuns();
  drawHours(shown);
  const asked = unknown.length ? ` The link selects ${unknown.join(", ")}, which this page does not contain.` : "";
  document.getElementById("count").textContent = `${grouped(shown.length)} of ${counted(rows, "row")} shown.${asked}`;
  if (window.Bokeh) figuresChanged();
  performance.measure("draw", "draw-begin");
}

// Attempts, and GPU hours where they are known, by status.
function drawHours(shown) {
  const sums = new Map();
  let untold = 0;
  for (const row of shown) {
    if (value("attempt", row) === null) continue;
    const sum = sums.get(value("state", row)) ?? { number: 0, hours: null }, hours = value("gpu_hours", row);
    untold += hours === null;
    sums.set(value("state", row), { number: sum.number + 1, hours: hours === null ? sum.hours : sum.hours + hours });
  }
  const known = "gpu_hours" in columns, total = [...sums.values()].reduce((sum, { hours }) => sum + hours, 0);
  const lines = [...sums].sort(([, a], [, b]) => b.hours - a.hours || b.number - a.number).map(([status, { number, hours }]) =>
    known ? [status, grouped(number), hours?.toPrecision(3) ?? "unknown", hours === null ? "" : percent(hours / (total || 1))] : [status, grouped(number)]);
  const heads = ["status", "attempts", ...(known ? ["GPU hours", "share of GPU hours"] : [])];
  const note = known ? `${total.toPrecision(3)} GPU hours in total${untold ? `; unknown for ${counted(untold, "attempt")}` : ""}.` : "These results have no GPU hours.";
  document.getElementById("hours").replaceChildren(table("Attempts of the shown rows by status", heads, lines), element("p", {}, note));
}

function buildFilters() {
  for (const name of FILTERS) {
    const options = distinct(name).map((v) => element("option", { value: v }, text(name, v)));
    const select = element("select", { name, onchange: filterChanged }, element("option", { value: "" }, "all"), ...options);
    document.getElementById("choices").append(element("label", {}, nameOf(name), select));
  }
  form.addEventListener("reset", () => { state.filters = {}; writeFragment(false); draw(); });
}

function filterChanged(event) {
  const { name, value: wanted } = event.target;
  delete state.filters[name];
  if (wanted !== "") state.filters[name] = distinct(name).find((v) => String(v) === wanted);
  closeExcluded();
  writeFragment(false);
  draw();
}

function figureChanged({ target }) {
  state[target.name] = target.value;
  writeFragment(false);
  figuresChanged();
}

// What no filter changes: effects, rejected layouts, the origin of the rows and the meaning of the columns.
function buildRest() {
  const left = held.public ? " Host names, paths, users, accounts and all free texts are removed." : "";
  const number = held.rejected.reduce((sum, one) => sum + one.number, 0);
  const byKernel = held.rejected.reduce((sum, one) => sum + (one.rule === "kernel" ? one.number : 0), 0);
  const forbidden = number ? `, and ${counted(number, "layout")} rejected: ${grouped(number - byKernel)} by rules, ${grouped(byKernel)} by the kernel` : "";
  document.getElementById("about").textContent = `${held.notice}${counted(rows, "row")}${forbidden}. ${held.made_with}${left}`;
  document.getElementById("how").textContent = held.cells.length
    ? `Each cell shows ${isPlan ? "the layout predicted to be fastest: its MFU and peak memory, then the predicted outcomes of all layouts" : "the fastest layout that is not suspect: its MFU, the interval of its step time if that is wider than its target, its peak memory, then the outcomes of all layouts"}. Colours show the MFU, from purple (0 %) to yellow (${held.mfu_end} %). Select a cell to list its layouts.${held.formula ? ` ${held.formula}.` : ""}`
    : "No row trains a model, so there is nothing to rank.";
  const { heads, rows: effects, notes } = held.effects;
  if (effects.length) document.getElementById("effects").append(table("Speed relative to the baseline", heads, effects));
  document.getElementById("effects").append(...notes.map((note) => element("p", {}, note)), ...(effects.length ? [] : [element("p", {}, "No two runs that can win differ in only one axis.")]));
  const nodes = document.getElementById("nodes");
  nodes.hidden = !held.nodes.rows.length;
  nodes.append(table("Slow and failing nodes first", held.nodes.heads, held.nodes.rows), element("p", {}, held.nodes.note));
  const rejected = held.rejected.map((r) => [r.model ?? "", text("nodes", r.nodes), grouped(r.number), r.rule ?? "", r.example ?? ""]);
  document.getElementById("rejected").append(rejected.length
    ? table("By model, nodes and rule", ["model", "nodes", "layouts", "rule", "for example"], rejected)
    : element("p", {}, "The results list no rejected layouts."));
  const origin = ["source", "sweep", "cluster", "hardware", "gpu_name", "kernel", "kernel_version", "kernel_digest", "precision", "flops_formula", "peak_flops_per_s", "peak_source", "git_commit", "torch_version", "cuda_version", "nccl_version", "driver_version"];
  const lines = origin.filter((name) => distinct(name).length).map((name) => [name, distinct(name).slice(0, MOST_VALUES).map((v) => text(name, v)).join(", ")]);
  document.getElementById("origin").append(table("Values in the rows", ["column", "values"], lines));
  const paragraphs = held.ranking.map((paragraph) => element("p", {}, ...paragraph.split("`").map((words, n) => (n % 2 ? element("code", {}, words) : words))));
  document.getElementById("columns").append(element("details", {}, element("summary", {}, "Rows and ranking"), ...paragraphs));
  for (const [group, found] of Object.entries(held.schema)) {
    if (!found.length) continue;
    document.getElementById("columns").append(element("details", {}, element("summary", {}, group), table(group, ["column", "type", "meaning"], found)));
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
    if (!document.activeElement?.offsetParent) (document.querySelector(`[data-run="${run}"]`) ?? buttons[cell])?.focus({ preventScroll: true });
  };
  addEventListener("hashchange", follow);
  follow();
}

start();
