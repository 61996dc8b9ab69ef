"use strict";
// Sliders over the layouts of a plan, and a bar of the memory that is predicted for the one they choose.

const FOLLOW = ["dp", "gas"]; // they follow from the other axes
const SLIDERS = ["model", "nodes", ...held.axes, "seq_len", "gbs", "precision"].filter((name) => !FOLLOW.includes(name) && distinct(name).length > 1);
const planned = [...Array(rows).keys()].filter((row) => value("source", row) === "predicted" && value("rank_mem_bytes", row));
const COLOURS = ["#3b6fb6", "#d9822b", "#5a9e52", "#a15cab", "#c2b02f", "#4fb0b0", "#9a9a9a"]; // one for each part

// How far a layout is from the places of the sliders, which stand at `places`.
function distanceOf(row, places) {
  return SLIDERS.reduce((sum, name) => sum + Math.abs(distinct(name).indexOf(value(name, row)) - places[name]), 0);
}

// The layout nearest to the sliders among those with the value of the slider that was moved.
function nearestLayout(places, moved) {
  const kept = planned.filter((row) => distinct(moved).indexOf(value(moved, row)) === places[moved]);
  return kept.reduce((best, row) => (distanceOf(row, places) < distanceOf(best, places) ? row : best), kept[0]);
}

function memoryBar(row) {
  const limit = value("rank_mem_bytes", row), sizes = held.parts.map((part) => value(`predicted_${part}_bytes`, row) ?? 0);
  const total = sizes.reduce((sum, size) => sum + size, 0), end = Math.max(limit, total) * 1.02;
  const parts = held.parts.map((part, n) => element("span", { style: `width:${(100 * sizes[n]) / end}%;background:${COLOURS[n]}`, title: `${part} ${memory(sizes[n])}` }));
  const bar = element("div", { class: "memory-bar", role: "img", "aria-label": `${memory(total)} of ${memory(limit)}` }, ...parts, element("i", { style: `left:${(100 * limit) / end}%` }));
  const legend = held.parts.map((part, n) => element("li", {}, element("b", { style: `background:${COLOURS[n]}` }), `${part} ${memory(sizes[n])}`));
  const verdict = `${value("layout", row)}: ${memory(total)} of ${memory(limit)} on the rank that needs the most, P(OOM) ${percent(value("p_oom", row))}`;
  const speed = value("step_time_s", row) === null ? "" : `; step ${text("step_time_s", value("step_time_s", row))}, MFU ${percent(value("mfu", row))}`;
  return [element("p", {}, verdict + speed), bar, element("ul", { class: "legend" }, ...legend)];
}

function buildMemory(box) {
  if (!planned.length) return;
  box.hidden = false;
  const shown = element("div", { "aria-live": "polite" }), followed = element("p", { role: "status" }), inputs = {}, outputs = {};
  let chosen;
  const choose = (row, moved) => {
    const changes = SLIDERS.filter((name) => moved && name !== moved && value(name, row) !== value(name, chosen));
    const words = changes.map((name) => `${nameOf(name)} from ${text(name, value(name, chosen))} to ${text(name, value(name, row))}`);
    followed.textContent = words.length ? `The plan has no layout with ${nameOf(moved)} ${text(moved, value(moved, row))} and the other values. Also changed: ${words.join(", ")}.` : "";
    chosen = row;
    for (const name of SLIDERS) {
      inputs[name].value = distinct(name).indexOf(value(name, row));
      outputs[name].textContent = text(name, value(name, row));
    }
    shown.replaceChildren(...memoryBar(row));
  };
  const placesNow = () => Object.fromEntries(SLIDERS.map((name) => [name, Number(inputs[name].value)]));
  const labels = SLIDERS.map((name) => {
    outputs[name] = element("output", {});
    const oninput = () => choose(nearestLayout(placesNow(), name), name);
    inputs[name] = element("input", { type: "range", name, min: 0, max: distinct(name).length - 1, "aria-label": nameOf(name), oninput });
    return element("label", {}, element("span", {}, `${nameOf(name)} `, outputs[name]), inputs[name]);
  });
  box.append(element("div", { class: "choices" }, ...labels), followed, shown);
  choose(planned.find((row) => value("rank", row) === 1) ?? planned[0]);
}
