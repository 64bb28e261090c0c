"use strict";

// Light or dark: the system's choice until the reader makes another; a page opened as a file may not store it.
(() => {
  const root = document.documentElement;
  const dark = () => (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  try { root.style.colorScheme = localStorage.getItem("refplan-theme") || ""; } catch { /* no storage: no memory */ }
  document.getElementById("theme").addEventListener("click", () => {
    root.style.colorScheme = dark() ? "light" : "dark";
    try { localStorage.setItem("refplan-theme", root.style.colorScheme); } catch { /* no storage: no memory */ }
    document.dispatchEvent(new Event("repaint"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("repaint")));
})();

// Tables: the first press sorts upwards (numbers: downwards), the next one turns it round.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const isNumber = heading.classList.contains("number");
    const before = heading.getAttribute("aria-sort");
    const descending = before ? before === "ascending" : isNumber;
    headings.forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.sort;
    const number = (text) => (text === "-inf" ? -Infinity : Number(text));
    const compare = (a, b) => (isNumber ? number(value(a)) - number(value(b)) || 0 : value(a).localeCompare(value(b), "en", { numeric: true }));
    const rows = [...table.tBodies[0].rows].sort((a, b) => (descending ? -compare(a, b) : compare(a, b)));
    table.tBodies[0].append(...rows);
  }));
}

function short(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

// Values under the pointer, read back from the drawn path and its scales.
for (const svg of document.querySelectorAll("svg.lines")) {
  const figure = svg.closest("figure");
  const [left, top, right, bottom] = svg.dataset.frame.split(",").map(Number);
  const [xLow, xHigh] = svg.dataset.x.split(",").map(Number);
  const [yLow, yHigh] = svg.dataset.y.split(",").map(Number);
  let lines = null;
  const hint = Object.assign(document.createElement("div"), { className: "hint", hidden: true });
  const rule = document.createElementNS(svg.namespaceURI, "line");
  rule.setAttribute("class", "rule");
  const parse = (path) => (path.getAttribute("d").match(/[\d.-]+ [\d.-]+/g) || []).map((pair) => pair.split(" ").map(Number));
  const hide = () => { hint.hidden = true; rule.remove(); };
  svg.addEventListener("pointermove", (event) => {
    lines ??= [...svg.querySelectorAll("path.line")].map((path) => [path.dataset.name, parse(path)]).filter(([, points]) => points.length);
    if (!lines.length) return;
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const nearest = (points) => points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
    const at = nearest(lines[0][1])[0];
    const say = lines.map(([name, points]) => `${name}  ${short(yLow + (bottom - nearest(points)[1]) / (bottom - top) * (yHigh - yLow))}`);
    hint.textContent = [short(xLow + (at - left) / (right - left) * (xHigh - xLow)), ...say].join("\n");
    for (const [name, value] of Object.entries({ x1: at, x2: at, y1: top, y2: bottom })) rule.setAttribute(name, value);
    svg.append(rule);
    figure.append(hint);
    hint.hidden = false;
    const place = event.clientX - figure.getBoundingClientRect().left;
    hint.style.left = `${Math.max(4, Math.min(place + 12, figure.clientWidth - hint.offsetWidth - 4))}px`;
    hint.style.top = `${event.clientY - figure.getBoundingClientRect().top - hint.offsetHeight - 10}px`;
  });
  svg.addEventListener("pointerleave", hide);
}
