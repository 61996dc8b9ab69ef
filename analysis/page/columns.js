"use strict";
// The data of the page as columns, and the texts of their values.

const GIB = 2 ** 30;
const pageData = JSON.parse(document.getElementById("data").textContent);
const numRows = pageData.num_rows;
const allRows = [...Array(numRows).keys()];
const isPlan = pageData.notice !== ""; // nothing was measured
const columns = decodeAll(pageData.columns);

// Each column of the data as an array with one value per row; a column that is absent has no value anywhere.
function decodeAll(encoded) {
  const decoded = {};
  for (const [name, column] of Object.entries(encoded))
    decoded[name] = column.values ?? column.codes.map((code) => (code < 0 ? null : column.distinct[code]));
  return decoded;
}

function value(name, row) {
  return columns[name]?.[row] ?? null;
}

// A number of the run for which a row stands: the median of its repeats where several compete.
function ofRun(name, row) {
  return value(`run_${name}`, row) ?? value(name, row);
}

// The distinct values of a column without null, words of an axis in its order and all else sorted.
function distinct(name) {
  if (pageData.orders[name]) return pageData.orders[name];
  return [...new Set(pageData.columns[name]?.distinct ?? columns[name] ?? [])]
    .filter((v) => v !== null)
    .sort(compareValues);
}

function compareValues(a, b) {
  return typeof a === "number" && typeof b === "number"
    ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });
}

function grouped(number) {
  return Number(number).toLocaleString("en-US", { maximumFractionDigits: 0 });
}

function counted(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function groupedInUnit(number, symbol, { factor }) {
  return grouped(number * factor);
}

// A number with three digits and a metric prefix, such as 1.34 G.
function withPrefix(number, unit = "") {
  for (const [size, prefix] of [
    [1e18, "E"],
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (Number(number.toPrecision(3)) >= size)
      return `${Number((number / size).toPrecision(3))} ${prefix}${unit}`;
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

// A probability in whole percents.
function chance(fraction) {
  return fraction < 0.01 ? "<1 %" : `${(100 * fraction).toFixed(0)} %`;
}

// A number with four digits and the unit in which figures draw it.
function plain(number, symbol = "", { axis, factor } = NO_UNIT) {
  const shown = number * factor;
  return `${Number.isInteger(shown) ? shown : Number(shown.toPrecision(4))} ${axis}`.trim();
}

// The form of a unit -> how texts show its numbers; the table of columns says which form and symbol a column has.
const TEXT_BY_FORM = { plain, grouped: groupedInUnit, percent, chance, memory, prefixed: withPrefix };
const NO_UNIT = { form: "plain", symbol: "", axis: "", factor: 1, title: "", texts: {} };

function unitOf(name) {
  return pageData.units[name] ?? NO_UNIT;
}

// The value of a column as a text with its unit; empty when it is unknown.
function text(name, cellValue) {
  if (cellValue === null || cellValue === undefined) return "";
  if (typeof cellValue === "boolean") return cellValue ? "True" : "False";
  if (typeof cellValue !== "number") return String(cellValue);
  const unit = unitOf(name);
  return unit.texts[cellValue] ?? TEXT_BY_FORM[unit.form](cellValue, unit.symbol, unit);
}

// Half of an interval beside its number, such as +- 4.3 %; one that reaches to zero says no more than that.
function halfWidth(name, fraction) {
  return fraction < 1 ? `+- ${text(name, fraction)}` : "+- 100 % or more";
}

// A number of a column without its unit, with three digits or as a whole number from 100 on.
function bareText(name, number) {
  const shown = drawn(name, number);
  return shown >= 100 ? grouped(shown) : String(Number(shown.toPrecision(3)));
}

// A number of a column in the unit in which figures draw it.
function drawn(name, number) {
  return number * unitOf(name).factor;
}

// The name of a column in tables and figures.
function headingOf(name) {
  return unitOf(name).title || name;
}

// The title of an axis that shows a column, with the unit in which it is drawn.
function axisTitle(name, title) {
  return `${title} (${unitOf(name).axis})`;
}

// An element with attributes and children; texts become text nodes, so that nothing in them is ever HTML.
function element(tag, attributes = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, setting] of Object.entries(attributes)) {
    if (name.startsWith("on")) created.addEventListener(name.slice(2), setting);
    else if (setting !== null && setting !== false)
      created.setAttribute(name, setting === true ? "" : setting);
  }
  created.append(...children.filter((child) => child !== null));
  return created;
}

// A caption that stays in view while its table scrolls sideways.
function captioned(caption) {
  return element("caption", {}, element("span", {}, caption));
}

// A table in a box that scrolls sideways; a row of `tableRows` is an array of texts or an element, and numbers are set
// to the right.
function table(caption, headings, tableRows) {
  const classOf = (cell, n) =>
    /^values?$/.test(headings[n])
      ? "value"
      : /^[-\d.,]+( \S+)?( \+- .*)?$/.test(cell)
        ? "number"
        : String(cell).length > 40
          ? "words"
          : null;
  const cellElements = (row) => row.map((cell, n) => element("td", { class: classOf(cell, n) }, cell));
  const head = element("tr", {}, ...headings.map((name) => element("th", { scope: "col" }, name)));
  const rowElements = tableRows.map((row) =>
    row instanceof Node ? row : element("tr", {}, ...cellElements(row)),
  );
  const tableElement = element(
    "table",
    {},
    captioned(caption),
    element("thead", {}, head),
    element("tbody", {}, ...rowElements),
  );
  return element("div", { class: "scroll" }, tableElement);
}
