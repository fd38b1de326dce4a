// Curves over positions with hover and keyboard values; one legend switches the lines of both charts.
const hidden = new Set();
const EDGE = { left: 44, right: 18, top: 8, bottom: 34 };
const TALL = 260;

const streams = () => [...new Set(DATA.groups.map((g) => g.stream))];
const inStream = () => DATA.groups.filter((g) => g.stream === streams()[byId("stream-choice").value]);
// A label keeps its colour whichever stream is shown.
const lookOf = (group) => [...new Set(DATA.groups.map((g) => g.label))].indexOf(group.label);

function scales(width, count) {
  const across = width - EDGE.left - EDGE.right;
  const high = TALL - EDGE.top - EDGE.bottom;
  return {
    x: (p) => EDGE.left + (count > 1 ? (p / (count - 1)) * across : across / 2),
    y: (v) => EDGE.top + (1 - v / 100) * high,
    nearest: (px) => Math.max(0, Math.min(count - 1, Math.round(((px - EDGE.left) / across) * (count - 1)) || 0)),
  };
}

function frame(width, count, to) {
  const step = Math.ceil(count / Math.max(2, Math.floor(width / 45)));
  const lines = [0, 20, 40, 60, 80, 100].flatMap((v) => [
    svg("path", { class: "grid", d: `M${EDGE.left - 10} ${to.y(v)}H${width - EDGE.right + 10}` }),
    svg("text", { x: EDGE.left - 14, y: to.y(v) + 4, "text-anchor": "end" }, v),
  ]);
  const ticks = [...Array(count).keys()].filter((p) => p % step === 0)
    .map((p) => svg("text", { x: to.x(p), y: TALL - 17, "text-anchor": "middle" }, p + 1));
  const title = svg("text", { x: (width + EDGE.left) / 2, y: TALL - 2, "text-anchor": "middle" }, "position");
  return [...lines, ...ticks, title];
}

function line(group, which, scale, beside) {
  // Drawn a little beside the others: equal lines would hide each other.
  const { mean, sd } = group[which];
  const to = { x: (p) => scale.x(p) + beside, y: scale.y };
  const known = mean.map((v, p) => [p, v]).filter(([, v]) => v !== null);
  const at = (p, v) => `${to.x(p).toFixed(1)} ${to.y(Math.max(0, Math.min(100, v))).toFixed(1)}`;
  const path = known.map(([p, v]) => at(p, v)).join("L");
  const [above, below] = [1, -1].map((side) => known.map(([p, v]) => at(p, v + side * sd[p])));
  const band = [...above, ...below.reverse()].join("L");
  const paint = colour(lookOf(group));
  const stroke = `fill:none;stroke:${paint};stroke-width:2`;
  return svg("g", { "data-label": group.label },
    group.seeds.length > 1 ? svg("path", { d: `M${band}Z`, style: `fill:${paint};opacity:.14` }) : null,
    svg("path", { d: `M${path}`, style: stroke, "stroke-dasharray": dash(lookOf(group)) }),
    ...known.map(([p, v]) => svg("circle", { cx: to.x(p), cy: to.y(v), r: 3, style: `fill:${paint}` })));
}

function values(groups, which, position) {
  // What a reader is told at a position: the best line first.
  const rows = groups.filter((g) => g[which].mean[position] !== null && g[which].mean[position] !== undefined);
  rows.sort((a, b) => b[which].mean[position] - a[which].mean[position]);
  const spread = (g) => (g.seeds.length > 1 ? ` ± ${digits(g[which].sd[position], 1)}` : "");
  const told = (g) => digits(g[which].mean[position], 1) + spread(g);
  return rows.map((g) => el("div", {}, swatch(colour(lookOf(g))), el("span", {}, g.label), el("span", {}, told(g))));
}

function chart(node, which, width) {
  const groups = inStream().filter((g) => !hidden.has(g.label));
  const count = Math.max(1, ...inStream().map((g) => g[which].mean.length));
  const to = scales(width, count);
  const guide = svg("path", { class: "guide" });
  const beside = (i) => Math.min(3, 24 / groups.length) * (i - (groups.length - 1) / 2);
  const title = `Lines over ${count} positions; arrow keys read the values`;
  const picture = svg("svg", { width, height: TALL, tabindex: 0, role: "img", "aria-label": title },
    ...frame(width, count, to), guide, ...groups.map((g, i) => line(g, which, to, beside(i))));
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  let here = -1;
  const hide = () => { tip.hidden = true; guide.removeAttribute("d"); here = -1; };
  const show = (position) => {
    here = position;
    tip.hidden = false;
    tip.replaceChildren(el("strong", {}, `position ${position + 1}`), ...values(groups, which, position));
    guide.setAttribute("d", `M${to.x(position)} ${EDGE.top}V${TALL - EDGE.bottom}`);
    const left = to.x(position) > width / 2 ? to.x(position) - tip.offsetWidth - 10 : to.x(position) + 10;
    tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, left))}px`;
  };
  picture.addEventListener("pointermove", (e) => show(to.nearest(e.clientX - picture.getBoundingClientRect().left)));
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (e) => {
    const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: count - 1 }[e.key];
    if (next !== undefined) { e.preventDefault(); show(Math.max(0, Math.min(count - 1, next))); }
    if (e.key === "Escape") hide();
  });
  node.replaceChildren(picture, tip);
}

function drawCurves() {
  for (const which of ["seen", "current"]) {
    const node = byId(`chart-${which}`);
    if (node.clientWidth) chart(node, which, Math.floor(node.clientWidth));
  }
}

function drawLegend() {
  byId("legend").replaceChildren(...inStream().map((group) => {
    const look = lookOf(group);
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
  options(byId("stream-choice"), streams(), 0);
  if (!DATA.groups.length) byId("legend").textContent = "No run is finished yet; there are no curves to show.";
  byId("stream-choice").addEventListener("change", () => { drawLegend(); drawCurves(); });
  if (DATA.groups.length) drawLegend();
  for (const which of ["seen", "current"]) onResize(byId(`chart-${which}`), () => DATA.groups.length && drawCurves());
}
