"use strict";
// Data and helpers. Text is always inserted as text nodes, so names in the data cannot become markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
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

function setOptions(select, texts, chosen) {
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
