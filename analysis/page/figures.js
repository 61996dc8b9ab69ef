"use strict";
// The figures of the shown rows; each has its numbers as a table, and is drawn when it comes into view or when nothing
// else happens.

const PEAK = "peak_mem_reserved_bytes",
  BANDWIDTH = "allreduce_busbw_bytes_per_s"; // columns whose units the figures have
const MEASURES = {
  mfu: axisTitle("mfu", headingOf("mfu")).replace(
    "of peak",
    pageData.cells.some((cell) => cell.of_peak) ? "of the peak of each precision" : "of peak",
  ),
  tokens_per_s_per_gpu: headingOf("tokens_per_s_per_gpu"),
  step_time_s: axisTitle("step_time_s", "step time"),
  memory_gib: axisTitle(PEAK, "peak memory"),
  predicted_step_time_s: axisTitle("predicted_step_time_s", "predicted step time"),
};
const Y_MEASURES = Object.keys(MEASURES).filter((name) => name === "memory_gib" || name in columns);
const X_COLUMNS = ["nodes", ...pageData.axes].filter((name) => name === "nodes" || distinct(name).length > 1);
// seaborn's colorblind
const PALETTE = ["#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494", "#56b4e9"];
const MARKERS = ["circle", "square", "triangle", "diamond", "inverted_triangle", "hex", "plus", "star"];
const DASHES = ["solid", "dashed", "dotted", "dotdash"];
const LINKS = Object.keys(columns).filter((name) => name.endsWith("_busbw_bytes_per_s"));
const FIGURES = [
  { id: "every", title: "Every layout", contentOf: everyPoints, draw: drawEvery },
  { id: "best-of", title: "Best layout for each value", contentOf: bestPoints, draw: drawLines },
  {
    id: "memory",
    title: isPlan
      ? "Predicted peak memory of the best layouts by part"
      : "Peak memory of the best layouts, measured and predicted by part",
    contentOf: memoryPoints,
    draw: drawBars,
  },
  { id: "links", title: "Link bandwidth", contentOf: linkPoints, draw: drawLines },
];
const MAX_LABEL_LETTERS = 90; // of the values of x that fit beside one another
const stale = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");
const views = {}; // figure -> what Bokeh shows of it
let queue = Promise.resolve(); // figures are drawn one after another
// Milliseconds without a change after which the figures out of view are drawn, too, so that the page can be printed.
const CALM_MS = 1000;
let printTimer;

// The value of a measure of MEASURES in its unit; null where it is unknown.
function measure(name, row) {
  if (name === "memory_gib") {
    const bytes = value(PEAK, row) ?? value("peak_mem_reserved_rank0_bytes", row);
    return bytes === null ? null : drawn(PEAK, bytes);
  }
  const columnValue = ofRun(name, row);
  return columnValue === null ? null : drawn(name, columnValue);
}

function measured(shown) {
  const { x, y } = state;
  const rankedRows = shown.filter(
    (row) => value("rank", row) !== null && isOk(row) && value("model", row) !== null,
  );
  return rankedRows.filter((row) => value(x, row) !== null && measure(y, row) !== null);
}

// Whether a run is drawn as one that may not win, was only screened, or was measured in full.
function dotOf(row) {
  if (!mayWin(row)) return "excluded";
  return screening(row) === null ? "in full" : "screened";
}

// Points of the figures: the name of a series, x (a word), y (a number), and the row if it is one.
function everyPoints(shown) {
  const points = measured(shown).map((row) => ({
    series: cellLabel(value("model", row), value("cell", row)),
    x: value(state.x, row),
    y: measure(state.y, row),
    row,
  }));
  const numOf = (dot) => points.filter(({ row }) => dotOf(row) === dot).length,
    numScreened = numOf("screened");
  const screenedText = numScreened ? `; hollow: ${numScreened} ${pageData.names.screened_by}` : "";
  const kindText = isPlan
    ? "that are likely to fit."
    : `that ended ok; crosses: ${numOf("excluded")} that are suspect or stopped early${screenedText}.`;
  const note = `${counted(points.length, "layout")} ${kindText} Select a point to open its layout.`;
  return { points, note, label: MEASURES[state.y], xColumn: state.x };
}

// The line of a cell: its model, its nodes unless these are on x, and what sets it apart from other cells of the model.
function lineOf(cell) {
  const { model, nodes } = pageData.cells[cell];
  return cellLabel(state.x === "nodes" ? model : `${model} on ${nodes}`, cell);
}

function cellLabel(name, cell) {
  return [name, ...pageData.cells[cell].apart].join(", ");
}

// The first run in the standings of its cell for each value of x, as in the scaling figure of Python; cells share no
// line.
function bestPoints(shown) {
  const shownSet = new Set(shown),
    drawableRows = new Set(measured(shown).filter(mayWin)),
    bestByKey = new Map();
  pageData.cells.forEach((_, cell) => {
    const series = lineOf(cell);
    for (const { row } of standings(cell, (n) => shownSet.has(n)).filter(({ row }) =>
      drawableRows.has(row),
    )) {
      const x = value(state.x, row),
        key = JSON.stringify([cell, x]);
      if (!bestByKey.has(key)) bestByKey.set(key, { series, x, y: measure(state.y, row), row });
    }
  });
  const suspectText = isPlan ? "" : "; suspect layouts are excluded";
  const otherAxesText = `with any values of the other axes${suspectText}`;
  const note = `The best shown run of each cell for each value of ${nameOf(state.x)}, ${otherAxesText}.`;
  return {
    points: [...bestByKey.values()].sort(
      (a, b) => compareValues(a.series, b.series) || compareValues(a.x, b.x),
    ),
    note,
    label: MEASURES[state.y],
    xColumn: state.x,
  };
}

function linkPoints(shown) {
  const rates = new Map();
  for (const row of shown)
    for (const name of LINKS) {
      const rate = value(name, row),
        isInsideNode = name.includes("_intra_node");
      if (rate === null || value("suspect", row) !== null) continue;
      const series = `${name.split("_")[0]}${isInsideNode ? " within a node" : ""}`,
        key = JSON.stringify([series, value("nodes", row)]);
      rates.set(key, [...(rates.get(key) ?? []), drawn(BANDWIDTH, rate)]);
    }
  const points = [...rates].map(([key, values]) => ({
    series: JSON.parse(key)[0],
    x: JSON.parse(key)[1],
    y: values.sort(compareValues)[values.length >> 1],
  }));
  const note =
    "Median bus bandwidth (as defined by nccl-tests), measured by the jobs of the shown rows; " +
    "suspect rows are excluded.";
  return {
    points: points.sort((a, b) => compareValues(a.series, b.series) || compareValues(a.x, b.x)),
    note,
    label: axisTitle(BANDWIDTH, "bus bandwidth"),
    xColumn: "nodes",
  };
}

function memoryPoints(shown) {
  const shownSet = new Set(shown),
    knowsRank0Only = !("peak_mem_reserved_bytes" in columns);
  const points = pageData.cells.flatMap((_, cell) => {
    const [firstRun] = standings(cell, (n) => shownSet.has(n));
    if (!firstRun?.best) return [];
    const { row } = firstRun;
    const { model, nodes } = pageData.cells[cell],
      x = cellLabel(`${model} on ${nodes}`, cell),
      parts = partsOf(row);
    const measuredBar = isPlan
      ? []
      : [["measured", value("peak_mem_reserved_bytes", row) ?? value("peak_mem_reserved_rank0_bytes", row)]];
    let baseGib = 0; // of a part, the sum of the parts below it
    return [
      ...measuredBar,
      ...(parts.length ? parts : [["predicted", value("predicted_peak_mem_bytes", row)]]),
    ]
      .filter(([, bytes]) => bytes)
      .map(([series, bytes]) => {
        const bar = { series, x, y: drawn(PEAK, bytes), baseGib, row };
        if (series !== "measured") baseGib += bar.y;
        return bar;
      });
  });
  const predictedText = "predicted by this version of ultrabench for the rank that needs the most";
  const measuredText = knowsRank0Only
    ? "The measured memory is that of rank 0."
    : "On CPUs, the measured memory is the resident set.";
  const note = isPlan
    ? `The best layout of each cell, as ${predictedText}.`
    : `The best layout of each cell. Left: measured. Right: ${predictedText}. ${measuredText}`;
  return {
    points,
    note,
    label: MEASURES.memory_gib,
    xColumn: "model on nodes",
    order: ["measured", ...pageData.parts, "predicted"],
  };
}

// A figure of Bokeh with the values of x as words, in the colours of the page.
function emptyFigure(content, xValues, tooltips) {
  const ink = getComputedStyle(document.body).color,
    grid = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  const bokehFigure = new Bokeh.Plotting.figure({
    height: 380,
    sizing_mode: "stretch_width",
    tools: "box_zoom,reset,save,tap",
    toolbar_location: "above",
    x_range: new Bokeh.Range1d({ start: -0.6, end: xValues.length - 0.4 }),
    y_range: new Bokeh.DataRange1d({ start: 0 }),
    background_fill_color: null,
    border_fill_color: null,
    outline_line_color: null,
  });
  bokehFigure.toolbar.active_drag = null; // a finger on the figure scrolls the page
  bokehFigure.toolbar.logo = null;
  bokehFigure.toolbar.stylesheets = ["@media print { :host { display: none; } }"];
  bokehFigure.add_tools(new Bokeh.HoverTool({ tooltips }));
  for (const [axis, label] of [
    [bokehFigure.xaxis, nameOf(content.xColumn)],
    [bokehFigure.yaxis, content.label],
  ])
    Object.assign(axis, {
      axis_label: label,
      axis_label_text_color: ink,
      major_label_text_color: ink,
      axis_line_color: grid,
      major_tick_line_color: grid,
      minor_tick_line_color: null,
    });
  bokehFigure.xaxis.ticker = new Bokeh.FixedTicker({ ticks: xValues.map((_, n) => n) });
  bokehFigure.xaxis.major_label_overrides = new Map(
    xValues.map((xValue, n) => [n, text(content.xColumn, xValue)]),
  );
  const letters = xValues.reduce((sum, xValue) => sum + String(text(content.xColumn, xValue)).length, 0);
  if (xValues.length > 12 || letters > MAX_LABEL_LETTERS)
    bokehFigure.xaxis.major_label_orientation = xValues.length > 24 ? 1.57 : 0.8;
  bokehFigure.xgrid.grid_line_color = null;
  bokehFigure.ygrid.grid_line_color = grid;
  return bokehFigure;
}

function xValuesOf(content) {
  return [...new Set(content.points.map(({ x }) => x))].sort(
    content.xColumn === "model on nodes" ? () => 0 : compareValues,
  );
}

function seriesOf(content) {
  const orderOf = (series) => content.order?.indexOf(series) ?? series;
  return [...new Set(content.points.map(({ series }) => series))].sort((a, b) =>
    compareValues(orderOf(a), orderOf(b)),
  );
}

// The points of one series for Bokeh; a chosen point opens its layout. `shift` moves a point sideways.
function sourceOf(seriesPoints, xValues, shift) {
  const position = seriesPoints.map((point) => xValues.indexOf(point.x) + shift(point));
  const source = new Bokeh.ColumnDataSource({
    data: {
      position,
      x: seriesPoints.map(({ x }) => String(x)),
      y: seriesPoints.map(({ y }) => y),
      base: seriesPoints.map(({ baseGib }) => baseGib ?? 0),
      top: seriesPoints.map(({ baseGib, y }) => (baseGib ?? 0) + y),
      series: seriesPoints.map(({ series }) => series),
      layout: seriesPoints.map(({ row }) => value("layout", row ?? -1) ?? ""),
    },
  });
  source.selected.properties.indices.change.connect(() => {
    const row = seriesPoints[source.selected.indices[0]]?.row;
    if (row !== undefined) openRow(row);
  });
  return source;
}

// A shift between -0.3 and 0.3 that is always the same for a run.
function jitter({ row }) {
  return (parseInt(String(value("run_id", row)).slice(-4), 16) / 65536 - 0.5) * 0.6 || 0;
}

const HOVER = [
  ["", "@series, @x"],
  ["value", "@y{0,0.[00]}"],
  ["layout", "@layout"],
];

// A figure to which `draw` adds the glyphs of each series: its points, colour, legend and number.
function withSeries(content, addGlyphs) {
  const xValues = xValuesOf(content),
    bokehFigure = emptyFigure(content, xValues, HOVER),
    names = seriesOf(content);
  names.forEach((name, n) =>
    addGlyphs(
      bokehFigure,
      xValues,
      content.points.filter(({ series }) => series === name),
      { color: PALETTE[n % PALETTE.length], legend_label: String(name) },
      n,
    ),
  );
  return bokehFigure;
}

// The marker of a series; those that share a colour have different ones.
function markerOf(n) {
  return MARKERS[(n + Math.floor(n / PALETTE.length)) % MARKERS.length];
}

const X_FIELD = { field: "position" },
  Y_FIELD = { field: "y" };

function drawEvery(content) {
  const alpha = dark.matches ? 0.95 : 0.65;
  return withSeries(content, (bokehFigure, xValues, seriesPoints, style, n) => {
    const marker = markerOf(n),
      shapes = {
        "in full": { marker, alpha },
        screened: { marker, line_alpha: alpha, line_width: 1.5, fill_alpha: 0 },
        excluded: { marker: "x", line_width: 1.5 },
      };
    const pointsByDot = Map.groupBy(seriesPoints, ({ row }) => dotOf(row)),
      dots = Object.keys(shapes).filter((dot) => pointsByDot.has(dot));
    dots.forEach((dot, place) =>
      bokehFigure.scatter(X_FIELD, Y_FIELD, {
        source: sourceOf(pointsByDot.get(dot), xValues, jitter),
        size: 7,
        color: style.color,
        ...shapes[dot],
        ...(place ? {} : style), // the first has the entry of the legend
      }),
    );
  });
}

function drawLines(content) {
  return withSeries(content, (bokehFigure, xValues, seriesPoints, style, n) => {
    const source = sourceOf(seriesPoints, xValues, () => 0);
    bokehFigure.line(X_FIELD, Y_FIELD, {
      source,
      line_width: 2,
      line_dash: DASHES[n % DASHES.length],
      ...style,
    });
    bokehFigure.scatter(X_FIELD, Y_FIELD, { source, size: 9, marker: markerOf(n), ...style });
  });
}

function drawBars(content) {
  return withSeries(content, (bokehFigure, xValues, seriesPoints, style, n) => {
    const source = sourceOf(seriesPoints, xValues, ({ series }) =>
      isPlan ? 0 : series === "measured" ? -0.2 : 0.2,
    );
    const hatch =
      n % 2 ? { hatch_pattern: "right_diagonal_line", hatch_color: "#fff", hatch_alpha: 0.6 } : {};
    bokehFigure.vbar(X_FIELD, 0.37, { field: "top" }, { field: "base" }, { source, ...style, ...hatch });
  });
}

// Draws a stale figure again after the tables have been painted, or says that there is nothing to draw.
async function drawFigure(figure) {
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  if (!stale.delete(figure.id)) return;
  discard(figure);
  const container = document.getElementById(`picture-${figure.id}`),
    content = figure.contentOf(shownRows());
  document.getElementById(`note-${figure.id}`).textContent = content.points.length
    ? content.note
    : "None of the shown rows has these numbers.";
  if (document.getElementById(`numbers-${figure.id}`).open) fillNumbers(figure, content);
  container.hidden = document.getElementById(`numbers-${figure.id}`).hidden = !content.points.length;
  if (container.hidden) return;
  const bokehFigure = figure.draw(content),
    pageStyle = getComputedStyle(document.documentElement);
  const names = seriesOf(content).map(String),
    longest = Math.max(...names.map((name) => name.length));
  const ncols = Math.max(1, Math.floor(container.clientWidth / (70 + 8 * longest)));
  bokehFigure.height += 28 * Math.max(0, Math.ceil(names.length / ncols) - 2); // pixels of a line of the legend
  Object.assign(bokehFigure.legend, {
    background_fill_color: null,
    label_text_color: pageStyle.color,
    border_line_color: null,
    padding: 0,
    spacing: 8,
    location: "top_left",
    orientation: "horizontal",
    ncols,
  });
  bokehFigure.add_layout(bokehFigure.legend, "above");
  const box = element("div", {});
  container.replaceChildren(box);
  views[figure.id] = await Bokeh.Plotting.show(bokehFigure, box);
  container.dataset.drawn = dark.matches ? "dark" : "light";
}

// Frees the memory of the last drawing of a figure.
function discard({ id }) {
  const documentIndex = Bokeh.documents.indexOf(views[id]?.model.document);
  views[id]?.remove();
  if (documentIndex >= 0) Bokeh.documents.splice(documentIndex, 1);
  delete views[id];
}

function drawLater(figure) {
  queue = queue.then(() => drawFigure(figure)).catch((error) => console.error(error));
}

// Fills the table of a figure; a click on its summary does so before the browser opens it, even if nothing is drawn
// yet.
function fillNumbers(figure, content = figure.contentOf(shownRows())) {
  const tableRows = content.points.map(({ series, x, y, row }) => [
    String(series),
    String(x),
    plain(y),
    value("layout", row ?? -1) ?? "",
  ]);
  const numbersTable = table(
    `${figure.title}: ${content.label}`,
    ["series", nameOf(content.xColumn), "value", "layout"],
    tableRows,
  );
  document.getElementById(`numbers-${figure.id}`).lastChild.replaceChildren(numbersTable);
}

function drawAll() {
  if (window.Bokeh) FIGURES.forEach(drawLater);
}

// Makes the places of the figures; each is drawn when it comes into view or is in view and has become stale.
function buildFigures(container) {
  const selector = (name, options, caption) =>
    element(
      "label",
      {},
      caption,
      element(
        "select",
        { name, onchange: figureChanged },
        ...options.map(([optionValue, optionText]) => element("option", { value: optionValue }, optionText)),
      ),
    );
  const choices = element(
    "form",
    { id: "axes", class: "choices", "aria-label": "Axes of the figures" },
    selector(
      "x",
      X_COLUMNS.map((name) => [name, nameOf(name)]),
      "horizontal axis",
    ),
    selector(
      "y",
      Y_MEASURES.map((name) => [name, MEASURES[name]]),
      "vertical axis",
    ),
  );
  container.append(element("h2", {}, "Figures"), choices);
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.dataset.inView = isIntersecting;
      if (isIntersecting && stale.has(target.id)) drawLater(FIGURES.find(({ id }) => id === target.id));
    }
  });
  for (const figure of FIGURES) {
    const { id, title } = figure;
    const picture = element("div", {
      id: `picture-${id}`,
      role: "figure",
      "aria-label": `${title}; the table below has its numbers`,
    });
    const numbers = element(
      "details",
      { id: `numbers-${id}` },
      element("summary", { onclick: () => fillNumbers(figure) }, "Numbers of this figure"),
      element("div", {}),
    );
    const section = element(
      "section",
      { id, class: "figure", "aria-label": title },
      element("h3", {}, title),
      element("p", { id: `note-${id}` }),
      picture,
      numbers,
    );
    container.append(section);
    observer.observe(section);
  }
}

function figuresChanged() {
  for (const figure of FIGURES) {
    stale.add(figure.id);
    delete document.getElementById(`picture-${figure.id}`).dataset.drawn;
    if (document.getElementById(figure.id).dataset.inView === "true") drawLater(figure);
  }
  clearTimeout(printTimer);
  printTimer = setTimeout(drawAll, CALM_MS);
}
