// Curves over positions. Mouse and keyboard show the values. One legend hides and shows lines in both charts.
const hidden = new Set();
const MARGIN = { left: 44, right: 18, top: 8, bottom: 34 };
const HEIGHT = 260;

const streams = () => [...new Set(DATA.groups.map((g) => g.stream))];
const inStream = () => DATA.groups.filter((g) => g.stream === streams()[byId("stream-choice").value]);
// A label has the same colour in every stream.
const lookIndex = (group) => [...new Set(DATA.groups.map((g) => g.label))].indexOf(group.label);

function makeScales(width, count) {
  const plotWidth = width - MARGIN.left - MARGIN.right;
  const plotHeight = HEIGHT - MARGIN.top - MARGIN.bottom;
  return {
    x: (p) => MARGIN.left + (count > 1 ? (p / (count - 1)) * plotWidth : plotWidth / 2),
    y: (v) => MARGIN.top + (1 - v / 100) * plotHeight,
    nearest: (px) => Math.max(0, Math.min(count - 1, Math.round(((px - MARGIN.left) / plotWidth) * (count - 1)) || 0)),
  };
}

function drawFrame(width, count, to) {
  const step = Math.ceil(count / Math.max(2, Math.floor(width / 45)));
  const lines = [0, 20, 40, 60, 80, 100].flatMap((v) => [
    svg("path", { class: "grid", d: `M${MARGIN.left - 10} ${to.y(v)}H${width - MARGIN.right + 10}` }),
    svg("text", { x: MARGIN.left - 14, y: to.y(v) + 4, "text-anchor": "end" }, v),
  ]);
  const ticks = [...Array(count).keys()].filter((p) => p % step === 0)
    .map((p) => svg("text", { x: to.x(p), y: HEIGHT - 17, "text-anchor": "middle" }, p + 1));
  const title = svg("text", { x: (width + MARGIN.left) / 2, y: HEIGHT - 2, "text-anchor": "middle" }, "position");
  return [...lines, ...ticks, title];
}

function drawLine(group, which, scale, offset) {
  // Lines are shifted a little: equal lines would cover each other.
  const { mean, sd } = group[which];
  const to = { x: (p) => scale.x(p) + offset, y: scale.y };
  const known = mean.map((v, p) => [p, v]).filter(([, v]) => v !== null);
  const at = (p, v) => `${to.x(p).toFixed(1)} ${to.y(Math.max(0, Math.min(100, v))).toFixed(1)}`;
  const path = known.map(([p, v]) => at(p, v)).join("L");
  const [above, below] = [1, -1].map((side) => known.map(([p, v]) => at(p, v + side * sd[p])));
  const band = [...above, ...below.reverse()].join("L");
  const paint = colour(lookIndex(group));
  const stroke = `fill:none;stroke:${paint};stroke-width:2`;
  return svg("g", { "data-label": group.label },
    group.seeds.length > 1 ? svg("path", { d: `M${band}Z`, style: `fill:${paint};opacity:.14` }) : null,
    svg("path", { d: `M${path}`, style: stroke, "stroke-dasharray": dash(lookIndex(group)) }),
    ...known.map(([p, v]) => svg("circle", { cx: to.x(p), cy: to.y(v), r: 3, style: `fill:${paint}` })));
}

function valueRows(groups, which, position) {
  // The values at a position, the highest first.
  const rows = groups.filter((g) => g[which].mean[position] !== null && g[which].mean[position] !== undefined);
  rows.sort((a, b) => b[which].mean[position] - a[which].mean[position]);
  const spread = (g) => (g.seeds.length > 1 ? ` ± ${formatNumber(g[which].sd[position], 1)}` : "");
  const text = (g) => formatNumber(g[which].mean[position], 1) + spread(g);
  return rows.map((g) => el("div", {}, swatch(colour(lookIndex(g))), el("span", {}, g.label), el("span", {}, text(g))));
}

function drawChart(node, which, width) {
  const groups = inStream().filter((g) => !hidden.has(g.label));
  const count = Math.max(1, ...inStream().map((g) => g[which].mean.length));
  const to = makeScales(width, count);
  const guide = svg("path", { class: "guide" });
  const offset = (i) => Math.min(3, 24 / groups.length) * (i - (groups.length - 1) / 2);
  const title = `Lines over ${count} positions; arrow keys show the values`;
  const picture = svg("svg", { width, height: HEIGHT, tabindex: 0, role: "img", "aria-label": title },
    ...drawFrame(width, count, to), guide, ...groups.map((g, i) => drawLine(g, which, to, offset(i))));
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  let current = -1;
  const hide = () => { tip.hidden = true; guide.removeAttribute("d"); current = -1; };
  const show = (position) => {
    current = position;
    tip.hidden = false;
    tip.replaceChildren(el("strong", {}, `position ${position + 1}`), ...valueRows(groups, which, position));
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
  node.replaceChildren(picture, tip);
}

function drawCurves() {
  for (const which of ["seen", "current"]) {
    const node = byId(`chart-${which}`);
    if (node.clientWidth) drawChart(node, which, Math.floor(node.clientWidth));
  }
}

function drawLegend() {
  byId("legend").replaceChildren(...inStream().map((group) => {
    const look = lookIndex(group);
    const sample = svg("svg", { width: 26, height: 10, "aria-hidden": "true" },
      svg("path", { d: "M0 5H26", style: `stroke:${colour(look)};stroke-width:2.5`, "stroke-dasharray": dash(look) }),
      svg("circle", { cx: 13, cy: 5, r: 3.5, style: `fill:${colour(look)}` }));
    const pressed = () => String(!hidden.has(group.label));
    const button = el("button", { type: "button", "aria-pressed": pressed() }, sample, group.label);
    button.addEventListener("click", () => {
      if (!hidden.delete(group.label)) hidden.add(group.label);
      button.setAttribute("aria-pressed", pressed());
      drawCurves();
    });
    return button;
  }));
}

function startCurves() {
  setOptions(byId("stream-choice"), streams(), 0);
  if (!DATA.groups.length) byId("legend").textContent = "No run is finished yet; there are no curves to show.";
  byId("stream-choice").addEventListener("change", () => { drawLegend(); drawCurves(); });
  if (DATA.groups.length) drawLegend();
  for (const which of ["seen", "current"]) onResize(byId(`chart-${which}`), () => DATA.groups.length && drawCurves());
}
