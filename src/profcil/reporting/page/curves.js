// Lines over positions. Mouse and keyboard show the values. One legend hides and shows methods in all charts.
const MARGIN = { left: 40, right: 18, top: 8, bottom: 36 };
const HEIGHT = 260;
const LINES = {
  seen: { title: "accuracy on the tasks met so far, % (ends at FAA)", places: 1 },
  current: { title: "accuracy on the current task, % (its mean is CTA)", places: 1 },
  alignment: { title: "stored against true class means (centred cosine)", places: 3 },
};

function limits(groups, which) {
  // 0 to 100 percent; alignment from its lowest value, rounded down, to 1.
  if (which !== "alignment") return { low: 0, high: 100, ticks: [0, 20, 40, 60, 80, 100] };
  const values = groups.flatMap((g) => g[which].mean).filter((v) => v !== null);
  const low = Math.min(0.8, Math.floor(Math.min(...values) * 5) / 5);
  return { low, high: 1, ticks: [0, 1, 2, 3, 4, 5].map((i) => low + (i * (1 - low)) / 5) };
}

function makeScales(width, count, { low, high }) {
  const plotWidth = width - MARGIN.left - MARGIN.right;
  const plotHeight = HEIGHT - MARGIN.top - MARGIN.bottom;
  return {
    x: (p) => MARGIN.left + (count > 1 ? (p / (count - 1)) * plotWidth : plotWidth / 2),
    y: (v) => MARGIN.top + (1 - (Math.max(low, Math.min(high, v)) - low) / (high - low)) * plotHeight,
    nearest: (px) => Math.max(0, Math.min(count - 1, Math.round(((px - MARGIN.left) / plotWidth) * (count - 1)) || 0)),
  };
}

function drawFrame(width, count, to, ticks) {
  const step = Math.ceil(count / Math.max(2, Math.floor(width / 45)));
  const name = (v) => (Number.isInteger(v) && Math.abs(v) > 1 ? v : v ? Number(v.toFixed(2)) : 0);
  const lines = ticks.flatMap((v) => [
    svg("path", { class: "grid", d: `M${MARGIN.left - 6} ${to.y(v)}H${width - MARGIN.right + 8}` }),
    svg("text", { x: MARGIN.left - 10, y: to.y(v) + 4, "text-anchor": "end" }, name(v)),
  ]);
  const numbers = [...Array(count).keys()].filter((p) => p % step === 0)
    .map((p) => svg("text", { x: to.x(p), y: HEIGHT - 19, "text-anchor": "middle" }, p + 1));
  const middle = (width + MARGIN.left - MARGIN.right) / 2;
  return [...lines, ...numbers, svg("text", { x: middle, y: HEIGHT - 3, "text-anchor": "middle" }, "position")];
}

function drawLine(group, which, to) {
  const { mean, sd } = group[which];
  const known = mean.map((v, p) => [p, v]).filter(([, v]) => v !== null);
  const at = (p, v) => `${to.x(p).toFixed(1)} ${to.y(v).toFixed(1)}`;
  const path = known.map(([p, v]) => at(p, v)).join("L");
  const [above, below] = [1, -1].map((side) => known.map(([p, v]) => at(p, v + side * sd[p])));
  const band = [...above, ...below.reverse()].join("L");
  const paint = paintOf(group);
  const stroke = `fill:none;stroke:${paint};stroke-width:2`;
  return svg("g", { "data-label": group.label },
    group.seeds.length > 1 ? svg("path", { d: `M${band}Z`, style: `fill:${paint};opacity:.13` }) : null,
    svg("path", { d: `M${path}`, style: stroke, "stroke-dasharray": dashOf(group) }),
    ...known.map(([p, v]) => drawMarker(group, to.x(p), to.y(v), 3)));
}

function valueRows(groups, which, position) {
  // The values at a position, the highest first.
  const rows = groups.filter((g) => g[which].mean[position] !== null && g[which].mean[position] !== undefined);
  rows.sort((a, b) => b[which].mean[position] - a[which].mean[position]);
  const { places } = LINES[which];
  const spread = (g) => (g.seeds.length > 1 ? ` ± ${formatNumber(g[which].sd[position], places)}` : "");
  const text = (g) => formatNumber(g[which].mean[position], places) + spread(g);
  return rows.map((g) => el("div", {}, swatch(paintOf(g)), el("span", {}, g.label), el("span", {}, text(g))));
}

function drawChart(node, which, setting, width) {
  const all = inSetting(setting).filter((g) => g[which]);
  if (!all.length) return node.replaceChildren(el("p", { class: "hint" }, "These runs have no values by position."));
  const groups = all.filter((g) => !hidden.has(g.label));
  const count = Math.max(1, ...all.map((g) => g[which].mean.length));
  const range = limits(all, which);
  const to = makeScales(width, count, range);
  const guide = svg("path", { class: "guide" });
  const title = `Lines over ${count} positions; arrow keys show the values`;
  const picture = svg("svg", { width, height: HEIGHT, tabindex: 0, role: "img", "aria-label": title },
    ...drawFrame(width, count, to, range.ticks), guide, ...[...groups].reverse().map((g) => drawLine(g, which, to)));
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  node.replaceChildren(picture, tip);
  addReading(picture, tip, guide, to, count, (position) => valueRows(groups, which, position), width);
}

function addReading(picture, tip, guide, to, count, rowsAt, width) {
  // Mouse and arrow keys show the values at a position.
  let current = -1;
  const hide = () => { tip.hidden = true; guide.removeAttribute("d"); current = -1; };
  const show = (position) => {
    current = position;
    tip.hidden = false;
    tip.replaceChildren(el("strong", {}, `position ${position + 1}`), ...rowsAt(position));
    guide.setAttribute("d", `M${to.x(position)} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}`);
    const left = to.x(position) > width / 2 ? to.x(position) - tip.offsetWidth - 10 : to.x(position) + 10;
    tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, left))}px`;
  };
  picture.addEventListener("pointermove", (e) => show(to.nearest(e.clientX - picture.getBoundingClientRect().left)));
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (e) => {
    const next = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: count - 1 }[e.key];
    if (next !== undefined) { e.preventDefault(); show(Math.max(0, Math.min(count - 1, next))); }
    if (e.key === "Escape") hide();
  });
}

function panel(which, setting, title) {
  // A chart with its caption; it is drawn when it has a width, and again when that changes.
  const node = el("div", { class: "chart", "data-which": which, "data-setting": setting });
  node.draw = () => {
    const width = Math.floor(node.clientWidth);
    if (!width) return;
    if (which === "bytes") drawTradeoff(node, setting, width);
    else drawChart(node, which, setting, width);
  };
  onResize(node, node.draw);
  return el("figure", { class: "card" }, el("figcaption", {}, el("b", {}, setting), ` · ${title}`), node);
}

function drawCharts() {
  const settings = settingsInView();
  byId("bytes-panels").replaceChildren(...settings.map((s) => panel("bytes", s, "FAA (%) against bytes sent")));
  const lines = ["seen", "current"].flatMap((which) => settings.map((s) => panel(which, s, LINES[which].title)));
  byId("position-panels").replaceChildren(...lines);
}

function drawLegend() {
  const labels = [...new Set(inView().map((g) => g.label))];
  byId("legend").replaceChildren(...labels.map((label) => {
    const group = inView().find((g) => g.label === label);
    const sample = svg("svg", { width: 30, height: 12, "aria-hidden": "true" },
      svg("path", { d: "M0 6H30", style: `stroke:${paintOf(group)};stroke-width:2`, "stroke-dasharray": dashOf(group) }),
      drawMarker(group, 15, 6, 4));
    const pressed = () => String(!hidden.has(label));
    const button = el("button", { type: "button", "aria-pressed": pressed() }, sample, label);
    button.addEventListener("click", () => {
      if (!hidden.delete(label)) hidden.add(label);
      button.setAttribute("aria-pressed", pressed());
      for (const chart of document.querySelectorAll(".chart")) chart.draw();
    });
    return button;
  }));
}
