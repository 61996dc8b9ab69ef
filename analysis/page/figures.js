"use strict";
// The figures of the shown rows; each has its numbers as a table, and is drawn when it comes into view or when nothing else happens.

const MEASURES = {
  mfu: held.cells.some((cell) => cell.of_peak) ? "MFU (% of the peak of each precision)" : "MFU (% of peak)", tokens_per_s_per_gpu: "tokens/s/GPU", step_time_s: "step time (s)",
  memory_gib: "peak memory (GiB)", predicted_step_time_s: "predicted step time (s)",
};
const UPWARDS = Object.keys(MEASURES).filter((name) => name === "memory_gib" || name in columns);
const ACROSS = ["nodes", ...held.axes].filter((name) => name === "nodes" || distinct(name).length > 1);
const PALETTE = ["#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494", "#56b4e9"]; // seaborn's colorblind
const MARKERS = ["circle", "square", "triangle", "diamond", "inverted_triangle", "hex", "plus", "star"];
const DASHES = ["solid", "dashed", "dotted", "dotdash"];
const LINKS = Object.keys(columns).filter((name) => name.endsWith("_busbw_bytes_per_s"));
const FIGURES = [
  { id: "every", title: "Every layout", points: everyPoints, draw: drawEvery },
  { id: "best-of", title: "Best layout for each value", points: bestPoints, draw: drawLines },
  { id: "memory", title: isPlan ? "Predicted peak memory of the best layouts by part" : "Peak memory of the best layouts, measured and predicted by part", points: memoryPoints, draw: drawBars },
  { id: "links", title: "Link bandwidth", points: linkPoints, draw: drawLines },
];
const MOST_LETTERS = 90; // of the words across that fit beside one another
const stale = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");
const views = {}; // figure -> what Bokeh shows of it
let queue = Promise.resolve(); // figures are drawn one after another
const CALM_MS = 1000; // after so long without a change those out of view are drawn, too, so that the page can be printed
let calm;

// The value of a measure of MEASURES in its unit; null where it is unknown.
function measure(name, row) {
  if (name === "memory_gib") {
    const bytes = value("peak_mem_reserved_bytes", row) ?? value("peak_mem_reserved_rank0_bytes", row);
    return bytes === null ? null : bytes / GIB;
  }
  const known = value(name, row);
  return name === "mfu" && known !== null ? 100 * known : known;
}

function measured(shown) {
  const { x, y } = state;
  const may = shown.filter((row) => value("rank", row) !== null && value("status", row) === "ok" && value("model", row) !== null);
  return may.filter((row) => value(x, row) !== null && measure(y, row) !== null);
}

// Points of the figures: the name of a series, x (a word), y (a number), and the row if it is one.
function everyPoints(shown) {
  const found = measured(shown).map((row) => ({ series: named(value("model", row), value("cell", row)), x: value(state.x, row), y: measure(state.y, row), row }));
  const suspects = found.filter(({ row }) => !mayWin(row)).length;
  const which = isPlan ? "that are likely to fit." : `that ended ok; crosses: ${suspects} that are suspect or stopped early.`;
  const note = `${counted(found.length, "layout")} ${which} Select a point to open its layout.`;
  return { found, note, label: MEASURES[state.y], across: state.x };
}

// The line of a cell: its model, its nodes unless these are across, and what sets it apart from other cells of the model.
function lineOf(cell) {
  const { model, nodes } = held.cells[cell];
  return named(state.x === "nodes" ? model : `${model} on ${nodes}`, cell);
}

function named(name, cell) {
  return [name, ...held.cells[cell].apart].join(", ");
}

// The first run in the standings of its cell for each value across, as in the scaling figure of Python; cells share no line.
function bestPoints(shown) {
  const isShown = new Set(shown), drawn = new Set(measured(shown).filter(mayWin)), best = new Map();
  held.cells.forEach((_, cell) => {
    const series = lineOf(cell);
    for (const { row } of standings(cell, (n) => isShown.has(n)).filter(({ row }) => drawn.has(row))) {
      const x = value(state.x, row), key = JSON.stringify([cell, x]);
      if (!best.has(key)) best.set(key, { series, x, y: measure(state.y, row), row });
    }
  });
  const note = `The best shown run of each cell for each value of ${nameOf(state.x)}, with any values of the other axes${isPlan ? "" : "; suspect layouts are excluded"}.`;
  return { found: [...best.values()].sort((a, b) => inOrder(a.series, b.series) || inOrder(a.x, b.x)), note, label: MEASURES[state.y], across: state.x };
}

function linkPoints(shown) {
  const rates = new Map();
  for (const row of shown) for (const name of LINKS) {
    const rate = value(name, row), inside = name.includes("_intra_node");
    if (rate === null || value("suspect", row) !== null) continue;
    const series = `${name.split("_")[0]}${inside ? " within a node" : ""}`, key = JSON.stringify([series, value("nodes", row)]);
    rates.set(key, [...(rates.get(key) ?? []), rate / 1e9]);
  }
  const found = [...rates].map(([key, all]) => ({ series: JSON.parse(key)[0], x: JSON.parse(key)[1], y: all.sort(inOrder)[all.length >> 1] }));
  const note = "Median bus bandwidth (as defined by nccl-tests), measured by the jobs of the shown rows; suspect rows are excluded.";
  return { found: found.sort((a, b) => inOrder(a.series, b.series) || inOrder(a.x, b.x)), note, label: "bus bandwidth (GB/s)", across: "nodes" };
}

function memoryPoints(shown) {
  const kept = new Set(shown), rank0 = !("peak_mem_reserved_bytes" in columns);
  const found = held.cells.flatMap((_, cell) => {
    const [first] = standings(cell, (n) => kept.has(n));
    if (!first?.best) return [];
    const { row } = first;
    const { model, nodes } = held.cells[cell], x = named(`${model} on ${nodes}`, cell), parts = partsOf(row);
    const measured = isPlan ? [] : [["measured", value("peak_mem_reserved_bytes", row) ?? value("peak_mem_reserved_rank0_bytes", row)]];
    let base = 0; // of a part, the sum of the parts below it
    return [...measured, ...(parts.length ? parts : [["predicted", value("predicted_peak_mem_bytes", row)]])].filter(([, bytes]) => bytes).map(([series, bytes]) => {
      const bar = { series, x, y: bytes / GIB, base, row };
      if (series !== "measured") base += bar.y;
      return bar;
    });
  });
  const note = isPlan ? "The best layout of each cell, as predicted by this version of ultrabench for the rank that needs the most." : `The best layout of each cell. Left: measured. Right: predicted by this version of ultrabench for the rank that needs the most. ${rank0 ? "The measured memory is that of rank 0." : "On CPUs, the measured memory is the resident set."}`;
  return { found, note, label: "peak memory (GiB)", across: "model on nodes", order: ["measured", ...held.parts, "predicted"] };
}

// A figure of Bokeh with words across, in the colours of the page.
function blank(points, words, hover) {
  const ink = getComputedStyle(document.body).color, grid = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  const made = new Bokeh.Plotting.figure({ height: 380, sizing_mode: "stretch_width", tools: "box_zoom,reset,save,tap", toolbar_location: "above",
    x_range: new Bokeh.Range1d({ start: -0.6, end: words.length - 0.4 }), y_range: new Bokeh.DataRange1d({ start: 0 }), background_fill_color: null, border_fill_color: null, outline_line_color: null });
  made.toolbar.active_drag = null; // a finger on the figure scrolls the page
  made.toolbar.logo = null;
  made.toolbar.stylesheets = ["@media print { :host { display: none; } }"];
  made.add_tools(new Bokeh.HoverTool({ tooltips: hover }));
  for (const [axis, label] of [[made.xaxis, nameOf(points.across)], [made.yaxis, points.label]])
    Object.assign(axis, { axis_label: label, axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: grid, major_tick_line_color: grid, minor_tick_line_color: null });
  made.xaxis.ticker = new Bokeh.FixedTicker({ ticks: words.map((_, n) => n) });
  made.xaxis.major_label_overrides = new Map(words.map((word, n) => [n, text(points.across, word)]));
  const letters = words.reduce((sum, word) => sum + String(text(points.across, word)).length, 0);
  if (words.length > 12 || letters > MOST_LETTERS) made.xaxis.major_label_orientation = words.length > 24 ? 1.57 : 0.8;
  made.xgrid.grid_line_color = null;
  made.ygrid.grid_line_color = grid;
  return made;
}

function wordsOf(points) {
  return [...new Set(points.found.map(({ x }) => x))].sort(points.across === "model on nodes" ? () => 0 : inOrder);
}

function seriesOf(points) {
  const place = (series) => points.order?.indexOf(series) ?? series;
  return [...new Set(points.found.map(({ series }) => series))].sort((a, b) => inOrder(place(a), place(b)));
}

// The points of one series for Bokeh; a chosen point opens its layout. `shift` moves a point sideways.
function sourceOf(found, words, shift) {
  const at = found.map((point) => words.indexOf(point.x) + shift(point));
  const source = new Bokeh.ColumnDataSource({ data: { at, x: found.map(({ x }) => String(x)), y: found.map(({ y }) => y),
    base: found.map(({ base }) => base ?? 0), top: found.map(({ base, y }) => (base ?? 0) + y),
    series: found.map(({ series }) => series), layout: found.map(({ row }) => value("layout", row ?? -1) ?? "") } });
  source.selected.properties.indices.change.connect(() => {
    const row = found[source.selected.indices[0]]?.row;
    if (row !== undefined) openRow(row);
  });
  return source;
}

// A shift between -0.3 and 0.3 that is always the same for a run.
function jitter({ row }) {
  return (parseInt(String(value("run_id", row)).slice(-4), 16) / 65536 - 0.5) * 0.6 || 0;
}

const HOVER = [["", "@series, @x"], ["value", "@y{0,0.[00]}"], ["layout", "@layout"]];

// A figure to which `draw` adds the glyphs of each series: its points, colour, legend and number.
function withSeries(points, draw) {
  const words = wordsOf(points), made = blank(points, words, HOVER), names = seriesOf(points);
  names.forEach((name, n) => draw(made, words, points.found.filter(({ series }) => series === name), { color: PALETTE[n % PALETTE.length], legend_label: String(name) }, n));
  return made;
}

// The marker of a series; those that share a colour have different ones.
function markerOf(n) {
  return MARKERS[(n + Math.floor(n / PALETTE.length)) % MARKERS.length];
}

const AT = { field: "at" }, UP = { field: "y" };

function drawEvery(points) {
  const alpha = dark.matches ? 0.95 : 0.65;
  return withSeries(points, (made, words, mine, look, n) => {
    for (const sound of [true, false]) {
      const found = mine.filter(({ row }) => mayWin(row) === sound), source = sourceOf(found, words, jitter);
      const kind = sound ? { marker: markerOf(n), alpha } : { marker: "x", line_width: 1.5 };
      if (found.length) made.scatter(AT, UP, { source, size: 7, color: look.color, ...kind, ...(sound || found.length === mine.length ? look : {}) });
    }
  });
}

function drawLines(points) {
  return withSeries(points, (made, words, found, look, n) => {
    const source = sourceOf(found, words, () => 0);
    made.line(AT, UP, { source, line_width: 2, line_dash: DASHES[n % DASHES.length], ...look });
    made.scatter(AT, UP, { source, size: 9, marker: markerOf(n), ...look });
  });
}

function drawBars(points) {
  return withSeries(points, (made, words, found, look, n) => {
    const source = sourceOf(found, words, ({ series }) => (isPlan ? 0 : series === "measured" ? -0.2 : 0.2));
    const hatch = n % 2 ? { hatch_pattern: "right_diagonal_line", hatch_color: "#fff", hatch_alpha: 0.6 } : {};
    made.vbar(AT, 0.37, { field: "top" }, { field: "base" }, { source, ...look, ...hatch });
  });
}

// Draws a stale figure again after the tables have been painted, or says that there is nothing to draw.
async function drawFigure(figure) {
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  if (!stale.delete(figure.id)) return;
  discard(figure);
  const place = document.getElementById(`picture-${figure.id}`), points = figure.points(shownRows());
  document.getElementById(`note-${figure.id}`).textContent = points.found.length ? points.note : "None of the shown rows has these numbers.";
  if (document.getElementById(`numbers-${figure.id}`).open) fillNumbers(figure, points);
  place.hidden = document.getElementById(`numbers-${figure.id}`).hidden = !points.found.length;
  if (place.hidden) return;
  const made = figure.draw(points), panel = getComputedStyle(document.documentElement);
  const names = seriesOf(points).map(String), longest = Math.max(...names.map((name) => name.length));
  const ncols = Math.max(1, Math.floor(place.clientWidth / (70 + 8 * longest)));
  made.height += 28 * Math.max(0, Math.ceil(names.length / ncols) - 2); // pixels of a line of the legend
  Object.assign(made.legend, { background_fill_color: null, label_text_color: panel.color, border_line_color: null, padding: 0, spacing: 8,
    location: "top_left", orientation: "horizontal", ncols });
  made.add_layout(made.legend, "above");
  const box = element("div", {});
  place.replaceChildren(box);
  views[figure.id] = await Bokeh.Plotting.show(made, box);
  place.dataset.drawn = dark.matches ? "dark" : "light";
}

// Frees the memory of the last drawing of a figure.
function discard({ id }) {
  const known = Bokeh.documents.indexOf(views[id]?.model.document);
  views[id]?.remove();
  if (known >= 0) Bokeh.documents.splice(known, 1);
  delete views[id];
}

function drawLater(figure) {
  queue = queue.then(() => drawFigure(figure)).catch((error) => console.error(error));
}

// Fills the table of a figure; a click on its summary does so before the browser opens it, even if nothing is drawn yet.
function fillNumbers(figure, points = figure.points(shownRows())) {
  const lines = points.found.map(({ series, x, y, row }) => [String(series), String(x), String(Number(y.toPrecision(4))), value("layout", row ?? -1) ?? ""]);
  const made = table(`${figure.title}: ${points.label}`, ["series", nameOf(points.across), "value", "layout"], lines);
  document.getElementById(`numbers-${figure.id}`).lastChild.replaceChildren(made);
}

function drawAll() {
  if (window.Bokeh) FIGURES.forEach(drawLater);
}

// Makes the places of the figures; each is drawn when it comes into view or is in view and has become stale.
function buildFigures(place) {
  const chosen = (name, options, words) => element("label", {}, words, element("select", { name, onchange: figureChanged }, ...options.map(([v, told]) => element("option", { value: v }, told))));
  const choices = element("form", { id: "axes", class: "choices", "aria-label": "Axes of the figures" }, chosen("x", ACROSS.map((name) => [name, nameOf(name)]), "horizontal axis"), chosen("y", UPWARDS.map((name) => [name, MEASURES[name]]), "vertical axis"));
  place.append(element("h2", {}, "Figures"), choices);
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.dataset.seen = isIntersecting;
      if (isIntersecting && stale.has(target.id)) drawLater(FIGURES.find(({ id }) => id === target.id));
    }
  });
  for (const figure of FIGURES) {
    const { id, title } = figure;
    const picture = element("div", { id: `picture-${id}`, role: "figure", "aria-label": `${title}; the table below has its numbers` });
    const numbers = element("details", { id: `numbers-${id}` }, element("summary", { onclick: () => fillNumbers(figure) }, "Numbers of this figure"), element("div", {}));
    const section = element("section", { id, class: "figure", "aria-label": title }, element("h3", {}, title), element("p", { id: `note-${id}` }), picture, numbers);
    place.append(section);
    seen.observe(section);
  }
}

function figuresChanged() {
  for (const figure of FIGURES) {
    stale.add(figure.id);
    delete document.getElementById(`picture-${figure.id}`).dataset.drawn;
    if (document.getElementById(figure.id).dataset.seen === "true") drawLater(figure);
  }
  clearTimeout(calm);
  calm = setTimeout(drawAll, CALM_MS);
}
