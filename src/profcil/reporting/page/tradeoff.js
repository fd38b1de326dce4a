// Accuracy against bytes: a point per method on a logarithmic axis, with its name and the spread over seeds.
const TRADEOFF = { height: 340, left: 40, right: 26, top: 12, bottom: 44, line: 15 };
const pen = document.createElement("canvas").getContext("2d");

function byteTicks(low, high, width) {
  // 1, 2 and 5 of every power of ten; only powers of ten if there is little space.
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const step of [1, 2, 5]) all.push(step * 10 ** power);
  }
  const inside = all.filter((v) => v >= low && v <= high);
  const tens = inside.filter((v) => Math.abs(Math.log10(v) % 1) < 1e-9);
  return inside.length * 62 > width && tens.length > 1 ? tens : inside;
}

function tickText(value) {
  return formatBytes(value).replace(/\.0+(?= )/, "").replace(/(\.\d*[1-9])0+(?= )/, "$1");
}

function tradeoffScales(groups, width) {
  const bytes = groups.map((g) => g.values.bytes_total.mean);
  const [min, max] = [Math.min(...bytes), Math.max(...bytes)];
  const range = Math.log10(max / min);
  const margin = Math.max(0.15, 0.1 * range, (1 - range) / 2); // at least a decade, so that there are ticks
  const [low, high] = [min / 10 ** margin, max * 10 ** margin];
  const [plotWidth, plotHeight] = [width - TRADEOFF.left - TRADEOFF.right, TRADEOFF.height - TRADEOFF.top - TRADEOFF.bottom];
  return {
    low, high, plotWidth,
    x: (v) => TRADEOFF.left + (Math.log(v / low) / Math.log(high / low)) * plotWidth,
    y: (v) => TRADEOFF.top + (1 - Math.max(0, Math.min(100, v)) / 100) * plotHeight,
  };
}

const crosses = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

function textWidth(text) {
  pen.font = "500 12px system-ui, sans-serif";
  return pen.measureText(text).width;
}

function labelLines(group, width) {
  // The name on one line, or its settings on a second one if it is long.
  const long = group.settings.length && textWidth(group.label) > 0.35 * width;
  return long ? [group.title, `(${group.settings.join(", ")})`] : [group.label];
}

function placeLabel(lines, x, y, taken, width) {
  // The free place beside the point that is nearest to it.
  const size = { w: Math.max(...lines.map(textWidth)), h: TRADEOFF.line * lines.length };
  const options = [];
  for (let step = 0; step < 16; step += 1) for (const way of step ? [-1, 1] : [1]) for (const side of [1, -1]) {
    const top = y + (way * step * TRADEOFF.line) / 2 - size.h / 2;
    const left = side > 0 ? x + 9 : x - 9 - size.w;
    options.push({ left, top, right: left + size.w, bottom: top + size.h, side });
  }
  const floor = TRADEOFF.height - TRADEOFF.bottom;
  const fits = (box) => box.left >= TRADEOFF.left - 4 && box.right <= width - 2 && box.top >= 0 && box.bottom <= floor;
  return options.find((box) => fits(box) && !taken.some((other) => crosses(box, other))) || options.find(fits) || options[0];
}

function tradeoffFrame(width, to) {
  const floor = TRADEOFF.height - TRADEOFF.bottom;
  const rows = [0, 20, 40, 60, 80, 100].flatMap((v) => [
    svg("path", { class: "grid", d: `M${TRADEOFF.left} ${to.y(v)}H${width - TRADEOFF.right}` }),
    svg("text", { x: TRADEOFF.left - 6, y: to.y(v) + 4, "text-anchor": "end" }, v)]);
  const ticks = byteTicks(to.low, to.high, to.plotWidth).flatMap((v) => [
    svg("path", { class: "grid", d: `M${to.x(v)} ${TRADEOFF.top}V${floor + 4}` }),
    svg("text", { x: to.x(v), y: floor + 18, "text-anchor": "middle" }, tickText(v))]);
  const middle = (TRADEOFF.left + width - TRADEOFF.right) / 2;
  return [...rows, ...ticks, svg("text", { x: middle, y: TRADEOFF.height - 6, "text-anchor": "middle" },
    "bytes sent in the stream (logarithmic)")];
}

function drawPoint(group, to) {
  const { faa, bytes_total: bytes } = group.values;
  const [x, y] = [to.x(bytes.mean), to.y(faa.mean)];
  const bar = faa.sd === null ? null : svg("path", { class: "error", style: `stroke:${paintOf(group)}`,
    d: `M${x} ${to.y(faa.mean - faa.sd)}V${to.y(faa.mean + faa.sd)}` });
  const text = `${group.label}: FAA ${formatSpread(faa, 1)}, ${formatBytes(bytes.mean)}, ${plural(group.seeds.length, "seed")}`;
  return svg("g", { "data-label": group.label }, svg("title", {}, text), bar, drawMarker(group, x, y, 5.5));
}

function drawLabels(groups, to, width) {
  const at = (g) => [to.x(g.values.bytes_total.mean), to.y(g.values.faa.mean)];
  const taken = groups.map(at).map(([x, y]) => ({ left: x - 8, right: x + 8, top: y - 6, bottom: y + 6 }));
  return groups.flatMap((group) => {
    const [x, y] = at(group);
    const lines = labelLines(group, width);
    const box = placeLabel(lines, x, y, taken, width);
    taken.push(box);
    const [tx, ty] = [box.side > 0 ? box.left : box.right, (box.top + box.bottom) / 2];
    const line = Math.abs(ty - y) > TRADEOFF.line ? svg("path", { class: "leader", style: `stroke:${paintOf(group)}`, d: `M${x} ${y}L${tx} ${ty}` }) : null;
    const look = { class: "name", "text-anchor": box.side > 0 ? "start" : "end", style: `fill:${paintOf(group)}` };
    const texts = lines.map((text, i) => svg("text", { x: tx, y: box.top + 11 + i * TRADEOFF.line, ...look }, text));
    return [line, ...texts].filter(Boolean);
  });
}

function drawTradeoff(node, setting, width) {
  const all = inSetting(setting).filter((g) => g.values.faa && g.values.bytes_total);
  if (!all.length) return node.replaceChildren(el("p", { class: "hint" }, "The bytes of these runs are not known."));
  const groups = all.filter((g) => !hidden.has(g.label));
  const to = tradeoffScales(all, width);
  node.replaceChildren(svg("svg", { width, height: TRADEOFF.height, role: "img", "aria-label": `FAA against bytes, ${setting}` },
    ...tradeoffFrame(width, to), ...groups.map((g) => drawPoint(g, to)), ...drawLabels(groups, to, width)));
}
