"use strict";
// The data of the page as columns, and the texts of their values.

const GIB = 2 ** 30;
const held = JSON.parse(document.getElementById("data").textContent);
const rows = held.rows;
const isPlan = held.notice !== ""; // nothing was measured
const columns = decodeAll(held.columns);

// Each column of the data as an array with one value per row; a column that is absent has no value anywhere.
function decodeAll(encoded) {
  const decoded = {};
  for (const [name, column] of Object.entries(encoded))
    decoded[name] = column.values ?? column.codes.map((code) => (code < 0 ? null : column.known[code]));
  return decoded;
}

function value(name, row) {
  return columns[name]?.[row] ?? null;
}

// The distinct values of a column without null, words of an axis in its order and all else sorted.
function distinct(name) {
  if (held.orders[name]) return held.orders[name];
  return [...new Set(held.columns[name]?.known ?? columns[name] ?? [])].filter((v) => v !== null).sort(inOrder);
}

function inOrder(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function grouped(number) {
  return Number(number).toLocaleString("en-US", { maximumFractionDigits: 0 });
}

function counted(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// A number with three digits and a metric prefix, such as 1.34 G.
function short(number, unit = "") {
  for (const [size, prefix] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Number(number.toPrecision(3)) >= size) return `${Number((number / size).toPrecision(3))} ${prefix}${unit}`;
  return `${Number(number.toPrecision(3))} ${unit}`.trim();
}

// A percentage such as 43.2 %, with two significant digits below 1 %, or < 0.01 %.
function percent(fraction) {
  const shown = 100 * fraction;
  if (shown > 0 && shown < 0.01) return "< 0.01 %";
  return `${shown >= 1 ? shown.toFixed(1) : Number(shown.toPrecision(2))} %`;
}

function memory(bytes) {
  const gib = bytes / GIB;
  if (Math.round(gib * 1024) < 1024) return `${(gib * 1024).toFixed(0)} MiB`;
  return `${gib.toFixed(Number(gib.toFixed(2)) >= 10 ? 1 : 2)} GiB`;
}

// The value of a column as a text with the unit that the column's name gives; empty when it is unknown.
function text(name, given) {
  if (given === null || given === undefined) return "";
  if (typeof given === "boolean") return given ? "True" : "False";
  if (typeof given !== "number") return String(given);
  if (name === "dp_shard" && given === 0) return "all ranks";
  if (/(mfu|hfu|p_oom|_rel|_share)$/.test(name)) return percent(given);
  if (name.endsWith("_bytes")) return memory(given);
  if (name.endsWith("_bytes_per_s")) return short(given, "B/s");
  if (/_flops_per_s(_per_gpu)?$/.test(name)) return short(given, "FLOP/s");
  if (name.endsWith("_hz")) return short(given, "Hz");
  if (name === "power_w_mean") return short(given, "W");
  if (name.endsWith("_j_per_step")) return short(given, "J");
  if (name.includes("tokens_per_s")) return grouped(given);
  const number = Number.isInteger(given) ? String(given) : String(Number(given.toPrecision(4)));
  return name.endsWith("_s") ? `${number} s` : number;
}

// An element with attributes and children; texts become text nodes, so that nothing in them is ever HTML.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, given] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), given);
    else if (given !== null && given !== false) made.setAttribute(name, given === true ? "" : given);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// A caption that stays in view while its table scrolls sideways.
function captioned(words) {
  return element("caption", {}, element("span", {}, words));
}

// A table in a box that scrolls sideways; a line of `body` is an array of texts or an element, numbers are set to the right.
function table(caption, heads, body) {
  const kind = (cell, n) => (/^values?$/.test(heads[n]) ? "value" : /^[-\d.,]+( \S+)?( \+- .*)?$/.test(cell) ? "number" : String(cell).length > 40 ? "words" : null);
  const cells = (line) => line.map((cell, n) => element("td", { class: kind(cell, n) }, cell));
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
  const lines = body.map((line) => (line instanceof Node ? line : element("tr", {}, ...cells(line))));
  const made = element("table", {}, captioned(caption), element("thead", {}, head), element("tbody", {}, ...lines));
  return element("div", { class: "scroll" }, made);
}
