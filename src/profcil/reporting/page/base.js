"use strict";
// Data and helpers. Text is always inserted as text nodes, so names in the data cannot become markup.
let DATA = JSON.parse(document.getElementById("data").textContent); // replaced when a served page gets new data
const SERIES = 7;
const DASHES = ["", "6 3", "2 2"];
// Viridis at even steps, dark to bright; it works for the colour-blind and in grey.
const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];

const byId = (id) => document.getElementById(id);

function setUp(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const el = (tag, attributes, ...children) => setUp(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  setUp(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A method has one colour and one marker everywhere; its variants differ in the dash and in the filling.
const paintOf = (group) => `var(--k${group.look})`;
const dashOf = (group) => DASHES[group.variant % DASHES.length];

function polygon(x, y, corners) {
  return `M${corners.map(([dx, dy]) => `${(x + dx).toFixed(1)} ${(y + dy).toFixed(1)}`).join("L")}Z`;
}

function markerPath(marker, x, y, r) {
  const [n, w] = [0.9 * r, 0.34 * r];
  const cross = [[-w, -r], [w, -r], [w, -w], [r, -w], [r, w], [w, w], [w, r], [-w, r], [-w, w], [-r, w], [-r, -w], [-w, -w]];
  const turned = cross.map(([dx, dy]) => [(dx - dy) * 0.72, (dx + dy) * 0.72]);
  const star = [...Array(10).keys()].map((i) => {
    const length = (i % 2 ? 0.5 : 1.25) * r;
    return [length * Math.sin((i * Math.PI) / 5), -length * Math.cos((i * Math.PI) / 5)];
  });
  const circle = [...Array(24).keys()].map((i) => [r * Math.cos((i * Math.PI) / 12), r * Math.sin((i * Math.PI) / 12)]);
  const shapes = {
    o: circle, s: [[-n, -n], [n, -n], [n, n], [-n, n]], D: [[0, -1.2 * r], [1.1 * r, 0], [0, 1.2 * r], [-1.1 * r, 0]],
    "^": [[0, -1.1 * r], [r, 0.8 * r], [-r, 0.8 * r]], v: [[0, 1.1 * r], [r, -0.8 * r], [-r, -0.8 * r]],
    P: cross, X: turned, "*": star,
  };
  return polygon(x, y, shapes[marker] || circle);
}

function drawMarker(group, x, y, r) {
  const fill = group.variant ? "var(--paper)" : paintOf(group);
  return svg("path", { d: markerPath(group.marker, x, y, r), style: `fill:${fill};stroke:${paintOf(group)};stroke-width:1.2` });
}

const iconOf = (group) => svg("svg", { class: "icon", width: 14, height: 14, "aria-hidden": "true" }, drawMarker(group, 7, 7, 5));

const formatSpread = (value, places) => {
  if (!value) return "–";
  return formatNumber(value.mean, places) + (value.sd === null ? "" : ` ± ${formatNumber(value.sd, places)}`);
};
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const term = (key) => el("abbr", { title: DATA.names[key].long }, DATA.names[key].short);

// The dataset that the charts show, and the groups hidden by the legend.
const view = { dataset: null };
const hidden = new Set();
const datasets = () => [...new Set(DATA.groups.map((g) => g.dataset))];
const inView = () => DATA.groups.filter((g) => g.dataset === view.dataset);
const settingsInView = () => [...new Set(inView().map((g) => g.setting))];
const bestRun = (place = 0) => DATA.groups[Math.min(place, DATA.groups.length - 1)]?.members[0] ?? place; // of the first stream
const inSetting = (setting) => inView().filter((g) => g.setting === setting);

const colour = (index) => `var(--s${index % SERIES})`;
const swatch = (paint) => el("span", { class: "key", style: `background:${paint}` });
const dash = (index) => DASHES[Math.floor(index / SERIES) % DASHES.length];

function viridis(fraction) {
  // The colour of the viridis scale for a fraction of 0 to 1, as [red, green, blue].
  const place = Math.max(0, Math.min(1, fraction)) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const part = (step, at) => parseInt(VIRIDIS[step].slice(at, at + 2), 16);
  return [1, 3, 5].map((at) => Math.round(part(low, at) + (part(low + 1, at) - part(low, at)) * (place - low)));
}

const rgb = (parts) => `rgb(${parts.join(" ")})`;

function textColour(parts) {
  // Black or white, whichever has more contrast (relative luminance of the WCAG).
  const [r, g, b] = parts.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

const formatNumber = (value, places) => (value === null || value === undefined ? "–" : value.toFixed(places));

function formatBytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(value) : value.toPrecision(3)} ${units[unit]}`;
}

function setOptions(select, texts, otherwise) {
  // The texts as options. What was chosen stays chosen if it is still there.
  const before = select.selectedIndex < 0 ? null : select.options[select.selectedIndex].text;
  const chosen = texts.includes(before) ? texts.indexOf(before) : Math.min(otherwise, texts.length - 1);
  select.replaceChildren(...texts.map((text, i) => el("option", { value: i, selected: i === chosen }, text)));
}

function onResize(node, draw) {
  // Draws for the current width, and again when it changes.
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(node.clientWidth);
    if (now && now !== width) draw((width = now));
  }).observe(node);
}
