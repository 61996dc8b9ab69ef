"use strict";
// The table of the best layouts: a row for each model, a column for each number of nodes, a button in each cell.

const VIRIDIS = [
  "#440154",
  "#472d7b",
  "#3b528b",
  "#2c728e",
  "#21918c",
  "#28ae80",
  "#5ec962",
  "#addc30",
  "#fde725",
];
// The red, green and blue (0 to 255) of a value between 0 and 1.
function viridis(share) {
  const position = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(position), VIRIDIS.length - 2);
  const channel = (hex, n) => parseInt(hex.slice(1 + 2 * n, 3 + 2 * n), 16);
  return [0, 1, 2].map((n) =>
    Math.round(
      channel(VIRIDIS[low], n) + (position - low) * (channel(VIRIDIS[low + 1], n) - channel(VIRIDIS[low], n)),
    ),
  );
}

// Whether white letters are easier to read than black ones on a colour (WCAG 2.2, relative luminance).
function isDark(rgb) {
  const linearChannels = rgb.map((channel) =>
    channel / 255 <= 0.04045 ? channel / 255 / 12.92 : ((channel / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * linearChannels[0] + 0.7152 * linearChannels[1] + 0.0722 * linearChannels[2] < 0.179;
}

// How many of the runs were tried, are as good as the best, ran out of memory or failed, as a text.
function tally(runs) {
  const count = (isCounted) => runs.filter(isCounted).length,
    isOom = (row) => value("status", row) === pageData.names.oom;
  const [allWord, oomWord] = pageData.outcomes,
    counts = [
      [count(({ row }) => tierOf(row) < 2), allWord],
      [count(({ asGood }) => asGood), "as good"],
      [count(({ row }) => isOom(row)), oomWord],
      [count(({ row }) => tierOf(row) === 1 && !isOom(row)), "failed"],
      [count(({ row }) => isSuspect(row)), "suspect"],
      [count(({ row }) => screening(row) !== null), "screened"],
      [count(({ row }) => tierOf(row) === 2), "pending"],
      [count(({ row }) => tierOf(row) === 3), "skipped"],
    ];
  return counts
    .filter(([number, outcome]) => number || outcome === allWord)
    .map(([number, outcome]) => `${grouped(number)} ${outcome}`)
    .join(", ");
}

function memoryOf(row) {
  const maxBytes = value("peak_mem_reserved_bytes", row),
    rank0Bytes = value("peak_mem_reserved_rank0_bytes", row);
  const allocatedBytes = value("peak_mem_allocated_bytes", row);
  return maxBytes !== null
    ? memory(maxBytes)
    : rank0Bytes !== null
      ? `${memory(rank0Bytes)} (rank 0)`
      : allocatedBytes !== null
        ? `${memory(allocatedBytes)} (allocated)`
        : "";
}

// Fills the button of a cell with the best of the runs that are shown, in the order of their standing.
function fillCell(button, cell, runs) {
  const bestRow = runs[0]?.best ? runs[0].row : -1,
    cellData = pageData.cells[cell],
    mfu = ofRun("mfu", bestRow);
  const headline =
    bestRow < 0
      ? ""
      : mfu !== null
        ? text("mfu", mfu) + cellData.of_peak
        : `${withPrefix(ofRun(RATE, bestRow) ?? 0)} ${unitOf(RATE).short}/GPU`;
  const showsAll = runs.length === runsOf[cell].length;
  const emptyText = showsAll
    ? (cellData.reason ?? "")
    : runs.length
      ? "no shown layout can win"
      : "no layout shown";
  const wideInterval = ofRun("ci_reached", bestRow) === false ? ofRun("step_time_ci95_rel", bestRow) : null;
  const intervalLine =
    wideInterval === null ? [] : [[halfWidth("step_time_ci95_rel", wideInterval), "sure"]];
  const suspectLine = bestRow >= 0 && value("suspect", bestRow) !== null ? [["suspect", "sure"]] : [];
  const textLines =
    bestRow < 0
      ? [[emptyText, "why"]]
      : [
          [headline, `headline ${wideInterval === null && !suspectLine.length ? "sure" : ""}`],
          ...suspectLine,
          ...intervalLine,
          [value("layout", bestRow), "layout"],
          [memoryOf(bestRow), ""],
        ];
  if (runs.length && (bestRow >= 0 || !showsAll))
    textLines.push([
      [value("environment", bestRow), value("repeats_failed", bestRow), tally(runs)]
        .filter(Boolean)
        .join(", "),
      "small",
    ]);
  button.replaceChildren(
    ...textLines.map(([content, className]) => element("span", { class: className }, content)),
  );
  const colour = bestRow < 0 || mfu === null ? null : viridis(drawn("mfu", mfu) / pageData.mfu_end);
  button.style.backgroundColor = colour ? `rgb(${colour})` : "";
  button.style.color = colour ? (isDark(colour) ? "#fff" : "#111") : "";
  button.classList.toggle("empty", bestRow < 0);
  button.classList.toggle("predicted", bestRow >= 0 && cellData.predicted);
  const place = `${cellData.model} on ${cellData.place}`;
  button.setAttribute(
    "aria-label",
    `${place}: ${textLines
      .map(([content]) => content)
      .filter(Boolean)
      .join(", ")}`,
  );
}

// The numbers of parameters of a model, all of them and those used for one token where these are fewer.
function sizeText(numParams, numActive) {
  if (numParams === null) return "";
  const activeText = numActive === null || numActive === numParams ? "" : `, ${withPrefix(numActive)} active`;
  return `${withPrefix(numParams)} parameters${activeText}`;
}

// One table for each hardware, kernel and batch; returns the button of each cell.
function buildHeatmap(container, onOpen) {
  const buttons = [];
  for (const panel of new Set(pageData.cells.map((cell) => cell.panel))) {
    const panelCells = pageData.cells
      .map((cell, index) => ({ ...cell, index }))
      .filter((cell) => cell.panel === panel);
    const places = [...new Map(panelCells.map((cell) => [cell.place, cell])).values()]
      .sort((a, b) => a.nodes - b.nodes || (a.partial_gpus ?? Infinity) - (b.partial_gpus ?? Infinity))
      .map((cell) => cell.place);
    const models = [
      ...new Set(
        panelCells.map((cell) => JSON.stringify([cell.num_params, cell.model, cell.num_active_params])),
      ),
    ]
      .map(JSON.parse)
      .sort((a, b) => a[0] - b[0]);
    const headRow = element(
      "tr",
      {},
      element("th", { scope: "col" }, "model"),
      ...places.map((place) => element("th", { scope: "col" }, place)),
    );
    const bodyRows = models.map(([numParams, name, numActive]) => {
      const sizeElement = element("span", { class: "small" }, sizeText(numParams, numActive));
      const label = element("th", { scope: "row" }, name, sizeElement);
      return element(
        "tr",
        {},
        label,
        ...places.map((place) =>
          element(
            "td",
            {},
            ...panelCells
              .filter((cell) => cell.model === name && cell.num_params === numParams && cell.place === place)
              .map(makeButton),
          ),
        ),
      );
    });
    function makeButton(cell) {
      buttons[cell.index] = element("button", {
        type: "button",
        "aria-controls": "runs",
        onclick: () => onOpen(cell.index),
      });
      return buttons[cell.index];
    }
    const caption = captioned(panelCells[0].setting.filter(Boolean).join(" | "));
    container.append(
      element(
        "div",
        { class: "scroll" },
        element(
          "table",
          { class: "heatmap" },
          caption,
          element("thead", {}, headRow),
          element("tbody", {}, ...bodyRows),
        ),
      ),
    );
  }
  return buttons;
}
