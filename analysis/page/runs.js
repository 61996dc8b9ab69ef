"use strict";
// The ranked layouts of one cell, and everything about one of them.

const RANKS = 8; // ranks of a failure that are shown; `sweep show` has all
const FIRST = 25; // rows of a table before "show all"
const RUN_COLUMNS = {
  layout: "layout", environment: "environment", place: "status", mfu: "MFU", tokens_per_s_per_gpu: "tokens/s/GPU",
  step_time_s: "step time", predicted_step_time_s: "predicted step time", memory: "peak memory", predicted_peak_mem_bytes: "predicted memory",
  p_oom: "P(OOM)", why: "reason",
};
const KINDS = { layout: "layout", environment: "words", place: "word", why: "words" }; // others are numbers
const ATTEMPT_COLUMNS = {
  repeat: "repeat", attempt: "attempt", state: "status", cause: "cause", step_time_s: "step time", duration_s: "duration",
  gpu_hours: "GPU hours", hostnames: "hosts", job_id: "job", allocation: "allocation", reason: "reason",
};

// The text of a column of RUN_COLUMNS or ATTEMPT_COLUMNS; a step time has its 95 % interval.
function shownText(name, row) {
  if (name === "memory") return memoryOf(row);
  if (name === "place") return value("stopped", row) === "slower_than_best" ? "slower" : isSuspect(row) ? "suspect" : value("state", row);
  if (name === "why") return [value("suspect", row), value("reason", row)].filter(Boolean).join("; ");
  const told = text(name, value(name, row)), sure = value("step_time_ci95_rel", row);
  if (name === "mfu" && told) return told + (held.cells[value("cell", row)]?.of_peak ?? "");
  if (name === "predicted_step_time_s" && told && value("extrapolated", row)) return `${told} (extrapolated)`;
  return name === "step_time_s" && told && sure !== null ? `${told} +- ${percent(sure)}` : told;
}

function used(names, found) {
  return Object.keys(names).filter((name) => found.some((row) => shownText(name, row) !== ""));
}

// The table of the shown runs of a cell in the order of their standing; a button in each row opens the details of its run.
function runsTable(ranked, all, opened, choose, showAll) {
  const marks = new Map(ranked.map(({ row, best, asGood }) => [row, best ? "best" : asGood ? "as good" : null])), found = [...marks.keys()];
  const names = used(RUN_COLUMNS, found), hidden = found.slice(FIRST).some((row) => value("contender", row) === opened);
  const shown = all || hidden ? found : found.slice(0, FIRST);
  const body = shown.flatMap((row) => {
    const id = value("contender", row), open = id === opened;
    const button = element("button", { type: "button", "aria-expanded": String(open), "data-run": id, onclick: () => choose(open ? null : id) }, `${value("rank", row)}`);
    const line = element("tr", { class: mayWin(row) ? null : "weak" }, element("th", { scope: "row" }, button));
    for (const name of names) line.append(element("td", { class: KINDS[name] ?? "number" }, (name === "place" && marks.get(row)) || shownText(name, row)));
    return open ? [line, element("tr", {}, element("td", { colspan: names.length + 1, class: "about-run" }, aboutRun(row)))] : [line];
  });
  const made = table("Layouts in ranking order; select a rank to see the details of its layout", ["rank", ...names.map((n) => RUN_COLUMNS[n])], body);
  if (shown.length < found.length) made.append(element("button", { type: "button", onclick: showAll }, `Show all ${grouped(found.length)}`));
  return made;
}

function aboutRun(row) {
  const id = value("run_id", row), contender = value("contender", row);
  const attempts = [...Array(rows).keys()].filter((n) => value("contender", n) === contender).sort((a, b) => value("repeat", a) - value("repeat", b) || value("attempt", a) - value("attempt", b));
  const names = used(ATTEMPT_COLUMNS, attempts);
  const tries = isPlan ? null : table("Attempts", names.map((n) => ATTEMPT_COLUMNS[n]), attempts.map((n) => names.map((name) => shownText(name, n))));
  const parts = partsOf(row).map(([part, bytes]) => [part, memory(bytes)]);
  const told = parts.length ? table("Memory of the rank that needs the most, as predicted by this version of ultrabench", ["part", "memory"], parts) : null;
  const beyond = value("extrapolated", row), mark = beyond ? element("p", {}, `Extrapolated: the profile was fitted to runs without ${beyond}; the fitted values are in brackets.`) : null;
  return element("div", {}, element("h3", {}, `Run ${id}`), commands(row), tries, ...attempts.map(evidenceOf), told, mark, allNumbers(row));
}

// The names and bytes of the parts of the predicted memory of a row; empty where they are unknown.
function partsOf(row) {
  return held.parts.map((part) => [part, value(`predicted_${part}_bytes`, row)]).filter(([, bytes]) => bytes);
}

// How the ranks of a failed attempt ended, those first that nobody killed; null for an attempt without evidence.
function evidenceOf(row) {
  const told = JSON.parse(value("evidence", row) ?? "{}"), ranks = told.ranks ?? [];
  const lines = [...ranks].sort((a, b) => Boolean(a.killed_by_us) - Boolean(b.killed_by_us)).slice(0, RANKS).map((rank) =>
    [rank.rank, rank.phase, rank.killed_by_us ? "killed by ultrabench" : rank.code, rank.error ?? rank.last_line].map((cell) => String(cell ?? "")));
  if (told.hang_cause) lines.unshift(["all", "", "hang", told.hang_cause]);
  return lines.length ? table(`Evidence of attempt ${value("repeat", row)}.${value("attempt", row)}`, ["rank", "phase", "exit", "last output"], lines) : null;
}

// The commands that show this run, or plan, predict and run its layout again.
function commands(row) {
  const id = value("run_id", row), found = [];
  if (value("sweep", row) !== null && value("source", row) === null) {
    found.push(["show this run", `ultrabench sweep show ${id} --sweep ${value("sweep", row)}`]);
    found.push(["show its log", `ultrabench sweep logs ${id} --sweep ${value("sweep", row)}`]);
  }
  found.push(["predict this layout", `ultrabench predict ${value("predict", row)}`]);
  found.push([isPlan ? "run this layout" : "run this layout again", `ultrabench sweep launch name=again ${value("launch", row)}`]);
  return element("dl", {}, ...found.flatMap(([what, words]) => [element("dt", {}, what), element("dd", {}, element("code", {}, words))]));
}

// Every known column of a row with its meaning.
function allNumbers(row) {
  const lines = Object.values(held.schema).flat().filter(([name]) => value(name, row) !== null).map(([name, , meaning]) => [name, text(name, value(name, row)), meaning]);
  return element("details", {}, element("summary", {}, "All columns"), table("All columns of this row", ["column", "value", "meaning"], lines));
}
