// SPDX-License-Identifier: Apache-2.0
// Elements, tables and small drawings. Text only ever becomes text: nothing here takes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `attributes`: by name; `children`: nodes, or what becomes text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** As `el`, of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, String(value));
  }
  node.append(...children.flat().map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/** A share of 1 as a bar and a percentage. `load`: whether much of it is a warning. */
export function bar(share, load = true) {
  const part = Math.min(1, Math.max(0, share || 0));
  const kind = !load ? "share" : part >= 0.85 ? "full" : part >= 0.6 ? "busy" : "share";
  const drawn = svg("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "track", width: 100, height: 10, rx: 2 }),
    svg("rect", { class: kind, width: 100 * part, height: 10, rx: 2 }));
  return [drawn, `${Math.round(100 * part)} %`];
}

/**
 * Fills a table. `columns`: {title, value(row), text?(row), node?(row), number?, header?}; `empty`: what to say without rows.
 * With `sorting` ({column, down}) the titles are buttons, and `sorted` is called when one is pressed.
 */
export function table(target, columns, rows, empty, sorting = null, sorted = null) {
  const titles = columns.map((column) => column.title).join("\n");
  if (target.dataset.titles !== titles) {
    // The head stays as it is while rows come and go, so that whoever is on a title stays there.
    target.dataset.titles = titles;
    const head = columns.map((column, at) => {
      const label = sorted ? el("button", { type: "button" }, column.title) : column.title;
      if (sorted) label.addEventListener("click", () => sorted(at));
      return el("th", { scope: "col", class: column.number ? "n" : null }, label);
    });
    target.replaceChildren(el("thead", {}, el("tr", {}, head)), el("tbody"));
  }
  if (sorting) {
    [...target.tHead.rows[0].cells].forEach((cell, at) => {
      if (at === sorting.column) cell.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }
  const shown = rows.map((row) => el("tr", {}, columns.map((column) => cell(column, row))));
  if (!shown.length) shown.push(el("tr", {}, el("td", { class: "empty", colspan: columns.length }, empty)));
  target.tBodies[0].replaceChildren(...shown);
}

function cell(column, row) {
  const classes = [column.number ? "n" : "", column.class || ""].join(" ").trim() || null;
  const content = column.node ? column.node(row) : (column.text || column.value)(row) ?? "-";
  return el(column.header ? "th" : "td", { class: classes, scope: column.header ? "row" : null,
    title: column.tip ? column.tip(row) : null }, content);
}

const WIDTH = 360;
const HEIGHT = 110;
const LEFT = 44;
const FOOT = 14;

/**
 * Lines over time. `lines`: {name, color, values: [number|null]}; `times`: seconds, one a value; `show`: a value as text.
 * `top`: greatest value of the axis, or null for the data's own.
 */
export function plot(title, lines, times, show, top = null) {
  const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const most = top ?? nice(Math.max(0, ...values));
  const span = Math.max(60, times.length ? times[times.length - 1] - times[0] : 0);
  const end = times.length ? times[times.length - 1] : 0;
  const x = (at) => LEFT + (WIDTH - LEFT - 4) * (1 - (end - at) / span);
  const y = (value) => 4 + (HEIGHT - FOOT - 8) * (1 - Math.min(1, value / most));
  const now = lines.map((line) => line.values[line.values.length - 1] ?? null);
  const said = lines.map((line, at) => `${line.name} ${now[at] === null ? "none" : show(now[at])}`).join(", ");
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${said}` },
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 4, y1: y(most / 2), y2: y(most / 2) }),
    svg("rect", { class: "frame", x: LEFT, y: 4, width: WIDTH - LEFT - 4, height: HEIGHT - FOOT - 8 }),
    svg("text", { x: LEFT - 6, y: 13, "text-anchor": "end" }, show(most)),
    svg("text", { x: LEFT - 6, y: HEIGHT - FOOT - 4, "text-anchor": "end" }, show(0)),
    svg("text", { x: LEFT, y: HEIGHT - 2 }, `${Math.round(span)} s ago`),
    svg("text", { x: WIDTH - 4, y: HEIGHT - 2, "text-anchor": "end" }, "now"),
    lines.map((line) => svg("path", { class: `trace stroke-${line.color}`, d: path(line.values, times, x, y) })));
  const caption = el("figcaption", {}, el("b", {}, title),
    lines.map((line, at) => el("span", { class: `color-${line.color}` },
      `${line.name} ${now[at] === null ? "-" : show(now[at])}`)));
  return el("figure", {}, caption, drawing);
}

function path(values, times, x, y) {
  let drawn = "";
  let pen = "M";
  values.forEach((value, at) => {
    if (value === null) { pen = "M"; return; }
    drawn += `${pen}${x(times[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return drawn || null;
}

/** The next round number. */
function nice(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value);
}

/** A request's hops as one strip. `from` and `until`: seconds on the axis; `at`: where the request's arrival is on it. */
export function strip(hops, at, age, from, until) {
  const scale = 1000 / Math.max(1e-6, until - from);
  const parts = hops.map((hop) => {
    const ended = hop.ended ?? age;
    const began = (at + hop.began - from) * scale;
    const width = Math.max(2, (ended - hop.began) * scale);
    const took = `${hop.name} ${milliseconds(ended - hop.began)}${hop.ended === null ? " so far" : ""}`;
    return svg("rect", { class: `fill-${hop.name}${hop.ended === null ? " running" : ""}`, x: began.toFixed(2),
      width: width.toFixed(2), y: 2, height: 16 }, svg("title", {}, took));
  });
  const said = hops.map((hop) => `${hop.name} ${milliseconds((hop.ended ?? age) - hop.began)}`).join(", ");
  return svg("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": said }, parts);
}

/** Seconds as text, in a unit that fits. */
export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const ms = 1e3 * seconds;
  if (ms === 0) return "0";
  if (ms >= 1e3) return `${seconds.toFixed(1)} s`;
  return ms >= 100 ? `${Math.round(ms)} ms` : `${ms.toPrecision(2)} ms`;
}
