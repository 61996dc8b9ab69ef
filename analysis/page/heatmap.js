"use strict";
// The table of the best layouts: a row for each model, a column for each number of nodes, a button in each cell.

const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
// The red, green and blue (0 to 255) of a value between 0 and 1.
function viridis(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const channel = (hex, n) => parseInt(hex.slice(1 + 2 * n, 3 + 2 * n), 16);
  return [0, 1, 2].map((n) => Math.round(channel(VIRIDIS[low], n) + (at - low) * (channel(VIRIDIS[low + 1], n) - channel(VIRIDIS[low], n))));
}

// Whether white letters are easier to read than black ones on a colour (WCAG 2.2, relative luminance).
function isDark(rgb) {
  const linear = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.179;
}

// How many of the runs were tried, are as good as the best, ran out of memory or failed, as a text.
function tally(runs) {
  const count = (wanted) => runs.filter(wanted).length, isOom = (row) => value("status", row) === "oom";
  const [all, oom] = held.outcomes, counts = [
    [count(({ row }) => tierOf(row) < 2), all],
    [count(({ asGood }) => asGood), "as good"],
    [count(({ row }) => isOom(row)), oom],
    [count(({ row }) => tierOf(row) === 1 && !isOom(row)), "failed"],
    [count(({ row }) => isSuspect(row)), "suspect"],
    [count(({ row }) => tierOf(row) === 2), "pending"],
    [count(({ row }) => tierOf(row) === 3), "skipped"],
  ];
  return counts.filter(([number, word]) => number || word === all).map(([number, word]) => `${grouped(number)} ${word}`).join(", ");
}

function memoryOf(row) {
  const all = value("peak_mem_reserved_bytes", row), first = value("peak_mem_reserved_rank0_bytes", row);
  return all !== null ? memory(all) : first !== null ? `${memory(first)} (rank 0)` : "";
}

// Fills the button of a cell with the best of the runs that are shown, in the order of their standing.
function fillCell(button, cell, runs) {
  const at = runs[0]?.best ? runs[0].row : -1, told = held.cells[cell], mfu = value("mfu", at);
  const headline = at < 0 ? "" : mfu !== null ? text("mfu", mfu) + told.of_peak : `${short(value("tokens_per_s_per_gpu", at) ?? 0)} tok/s/GPU`;
  const whole = runs.length === runsOf[cell].length;
  const why = whole ? told.reason ?? "" : runs.length ? "no shown layout can win" : "no layout shown";
  const wide = value("ci_reached", at) === false ? value("step_time_ci95_rel", at) : null;
  const interval = wide === null ? [] : [[`+- ${percent(wide)}`, "sure"]];
  const suspect = at >= 0 && value("suspect", at) !== null ? [["suspect", "sure"]] : [];
  const lines = at < 0 ? [[why, "why"]] : [[headline, `headline ${wide === null && !suspect.length ? "sure" : ""}`], ...suspect, ...interval, [value("layout", at), "layout"], [memoryOf(at), ""]];
  if (runs.length && (at >= 0 || !whole)) lines.push([[value("environment", at), value("repeats_failed", at), tally(runs)].filter(Boolean).join(", "), "small"]);
  button.replaceChildren(...lines.map(([words, kind]) => element("span", { class: kind }, words)));
  const colour = at < 0 || mfu === null ? null : viridis(100 * mfu / held.mfu_end);
  button.style.backgroundColor = colour ? `rgb(${colour})` : "";
  button.style.color = colour ? (isDark(colour) ? "#fff" : "#111") : "";
  button.classList.toggle("empty", at < 0);
  button.classList.toggle("predicted", at >= 0 && told.predicted);
  const where = `${told.model} on ${counted(told.nodes, "node")}`;
  button.setAttribute("aria-label", `${where}: ${lines.map(([words]) => words).filter(Boolean).join(", ")}`);
}

// One table for each hardware, kernel and batch; returns the button of each cell.
function buildHeatmap(place, opened) {
  const buttons = [];
  for (const panel of new Set(held.cells.map((cell) => cell.panel))) {
    const mine = held.cells.map((cell, n) => ({ ...cell, n })).filter((cell) => cell.panel === panel);
    const nodes = [...new Set(mine.map((cell) => cell.nodes))].sort(inOrder);
    const models = [...new Set(mine.map((cell) => JSON.stringify([cell.num_params, cell.model, cell.num_active_params])))].map(JSON.parse).sort((a, b) => a[0] - b[0]);
    const head = element("tr", {}, element("th", { scope: "col" }, "model"), ...nodes.map((n) => element("th", { scope: "col" }, counted(n, "node"))));
    const body = models.map(([params, name, active]) => {
      const label = element("th", { scope: "row" }, name, element("span", { class: "small" }, params === null ? "" : `${short(params)} parameters${active === null || active === params ? "" : `, ${short(active)} active`}`));
      return element("tr", {}, label, ...nodes.map((n) => element("td", {}, ...mine.filter((c) => c.model === name && c.num_params === params && c.nodes === n).map(makeButton))));
    });
    function makeButton(cell) {
      buttons[cell.n] = element("button", { type: "button", "aria-controls": "runs", onclick: () => opened(cell.n) });
      return buttons[cell.n];
    }
    const caption = captioned(mine[0].setting.filter(Boolean).join(" | "));
    place.append(element("div", { class: "scroll" }, element("table", { class: "heatmap" }, caption, element("thead", {}, head), element("tbody", {}, ...body))));
  }
  return buttons;
}
