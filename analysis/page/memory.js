"use strict";
// Sliders over the layouts of a plan, and a bar of the memory that is predicted for the one they choose.

const DERIVED_AXES = ["dp", "gas"]; // they follow from the other axes
const SLIDERS = ["model", "nodes", ...pageData.axes, "seq_len", "gbs", "precision"].filter(
  (name) => !DERIVED_AXES.includes(name) && distinct(name).length > 1,
);
const planned = allRows.filter(
  (row) => value("source", row) === "predicted" && value("rank_mem_bytes", row),
);
const PART_COLOURS = ["#3b6fb6", "#d9822b", "#5a9e52", "#a15cab", "#c2b02f", "#4fb0b0", "#9a9a9a"]; // one for each part

// How far a layout is from the places of the sliders, which stand at `places`.
function distanceOf(row, places) {
  return SLIDERS.reduce(
    (sum, name) => sum + Math.abs(distinct(name).indexOf(value(name, row)) - places[name]),
    0,
  );
}

// The layout nearest to the sliders among those with the value of the slider that was moved.
function nearestLayout(places, moved) {
  const candidates = planned.filter((row) => distinct(moved).indexOf(value(moved, row)) === places[moved]);
  return candidates.reduce(
    (best, row) => (distanceOf(row, places) < distanceOf(best, places) ? row : best),
    candidates[0],
  );
}

function memoryBar(row) {
  const limitBytes = value("rank_mem_bytes", row),
    partBytes = pageData.parts.map((part) => value(`predicted_${part}_bytes`, row) ?? 0);
  const totalBytes = partBytes.reduce((sum, bytes) => sum + bytes, 0),
    endBytes = Math.max(limitBytes, totalBytes) * 1.02;
  const parts = pageData.parts.map((part, n) =>
    element("span", {
      style: `width:${(100 * partBytes[n]) / endBytes}%;background:${PART_COLOURS[n]}`,
      title: `${part} ${memory(partBytes[n])}`,
    }),
  );
  const barElement = element(
    "div",
    { class: "memory-bar", role: "img", "aria-label": `${memory(totalBytes)} of ${memory(limitBytes)}` },
    ...parts,
    element("i", { style: `left:${(100 * limitBytes) / endBytes}%` }),
  );
  const legend = pageData.parts.map((part, n) =>
    element(
      "li",
      {},
      element("b", { style: `background:${PART_COLOURS[n]}` }),
      `${part} ${memory(partBytes[n])}`,
    ),
  );
  const fillText = `${memory(totalBytes)} of ${memory(limitBytes)} on the rank that needs the most`;
  const oomText = `${headingOf("p_oom")} ${text("p_oom", value("p_oom", row))}`;
  const verdict = `${value("layout", row)}: ${fillText}, ${oomText}`;
  const stepTime = value("step_time_s", row);
  const mfuText = `${headingOf("mfu")} ${text("mfu", value("mfu", row))}`;
  const speedText = stepTime === null ? "" : `; step ${text("step_time_s", stepTime)}, ${mfuText}`;
  return [element("p", {}, verdict + speedText), barElement, element("ul", { class: "legend" }, ...legend)];
}

function buildMemory(container) {
  if (!planned.length) return;
  container.hidden = false;
  const barBox = element("div", { "aria-live": "polite" }),
    changesNote = element("p", { role: "status" }),
    inputs = {},
    outputs = {};
  let chosenRow;
  const chooseLayout = (newRow, movedSlider) => {
    const changes = SLIDERS.filter(
      (name) => movedSlider && name !== movedSlider && value(name, newRow) !== value(name, chosenRow),
    );
    const changeTexts = changes.map(
      (name) =>
        `${nameOf(name)} from ${text(name, value(name, chosenRow))} to ${text(name, value(name, newRow))}`,
    );
    const movedText = movedSlider
      ? `${nameOf(movedSlider)} ${text(movedSlider, value(movedSlider, newRow))}`
      : "";
    changesNote.textContent = changeTexts.length
      ? `The plan has no layout with ${movedText} and the other values. Also changed: ${changeTexts.join(", ")}.`
      : "";
    chosenRow = newRow;
    for (const name of SLIDERS) {
      inputs[name].value = distinct(name).indexOf(value(name, newRow));
      outputs[name].textContent = text(name, value(name, newRow));
    }
    barBox.replaceChildren(...memoryBar(newRow));
  };
  const placesNow = () => Object.fromEntries(SLIDERS.map((name) => [name, Number(inputs[name].value)]));
  const labels = SLIDERS.map((name) => {
    outputs[name] = element("output", {});
    const oninput = () => chooseLayout(nearestLayout(placesNow(), name), name);
    inputs[name] = element("input", {
      type: "range",
      name,
      min: 0,
      max: distinct(name).length - 1,
      "aria-label": nameOf(name),
      oninput,
    });
    return element("label", {}, element("span", {}, `${nameOf(name)} `, outputs[name]), inputs[name]);
  });
  container.append(element("div", { class: "choices" }, ...labels), changesNote, barBox);
  chooseLayout(planned.find((row) => value("rank", row) === 1) ?? planned[0]);
}
