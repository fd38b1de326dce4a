// One run: heatmap, ledger, settings and environment.
function scoreCell(value, task, position, places) {
  const where = `task ${task + 1} after position ${position + 1}`;
  if (value === null) return el("td", { class: "none", title: `${where}: no score` }, "–");
  const paint = viridis(value / 100);
  const style = `background:${rgb(paint)};color:${textColour(paint)}`;
  return el("td", { style, title: `${where}: ${value.toFixed(2)} %` }, value.toFixed(places));
}

function drawHeatmap(run, table) {
  if (!run.tasks.length) {
    const text = "This row of a results store was imported without scores by task.";
    return table.replaceChildren(el("tbody", {}, el("tr", {}, el("td", { class: "none" }, text))));
  }
  const places = run.tasks.length > 12 ? 0 : 1;
  const heads = run.tasks.map((_, p) => el("th", { scope: "col" }, p + 1));
  const rows = run.tasks.map((_, task) => el("tr", {}, el("th", { scope: "row" }, `task ${task + 1}`),
    ...run.tasks.map((scores, p) => scoreCell(scores[task], task, p, places))));
  const head = el("tr", {}, el("th", { scope: "col" }, "position"), ...heads);
  table.replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}

function trafficBar(title, parts) {
  // One direction as a stacked bar; every kind is at least two pixels wide.
  const total = parts.reduce((sum, part) => sum + part.count, 0);
  const name = (part) => `${part.kind}: ${formatBytes(part.count)}`;
  const pieces = parts.map((part) => el("span", {
    style: `background:${colour(part.look)};width:${(100 * part.count) / (total || 1)}%`, title: name(part) }));
  return el("div", {}, `${title}: ${formatBytes(total)}`,
    el("div", { class: "bar", role: "img", "aria-label": parts.map(name).join(", ") }, ...pieces));
}

function drawLedger(run) {
  const kinds = [...new Set(run.ledger.map((e) => e.kind))].sort();
  const sum = (direction, kind, part = "stream") => run.ledger
    .filter((e) => e.direction === direction && (kind === null || e.kind === kind))
    .reduce((total, e) => total + e[part], 0);
  const parts = (direction) => kinds
    .map((kind, look) => ({ kind, look, count: sum(direction, kind) })).filter((part) => part.count);
  const line = (head, down, up) => el("tr", {}, el("th", { scope: "row" }, ...head),
    ...[down, up, down + up].map((n) => el("td", { class: "number" }, n ? formatBytes(n) : "–")));
  const rows = kinds.map((kind, i) => line([swatch(colour(i)), ` ${kind}`], sum("down", kind), sum("up", kind)));
  const sums = [["stream", "stream"], ["warm-up, shared", "warmup"]]
    .map(([title, part]) => line([title], sum("down", null, part), sum("up", null, part)));
  const heads = ["kind", "down", "up", "both"].map((t, i) => el("th", { scope: "col", class: i ? "number" : null }, t));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows, ...sums));
  byId("ledger").replaceChildren(trafficBar("server to clients", parts("down")),
    trafficBar("clients to server", parts("up")), el("div", { class: "scroll" }, table));
}

function asText(value) {
  if (value === null || value === undefined) return "–";
  return value === "" ? "(empty)" : String(value);
}

function fillTable(table, values) {
  table.replaceChildren(el("tbody", {}, ...Object.entries(values).map(([key, value]) =>
    el("tr", {}, el("th", { scope: "row", class: "fold" }, key), el("td", { class: "fold" }, asText(value))))));
}

function costs(run) {
  return {
    "seconds": formatNumber(run.seconds, 1),
    "warm-up seconds": formatNumber(run.warmup_seconds, 1),
    "peak memory": formatBytes(run.peak_memory_mb && run.peak_memory_mb * 1e6),
    "server memory": formatBytes(run.server_memory_bytes),
    "client extra memory": formatBytes(run.client_extra_bytes),
  };
}

function showRun(index, jump) {
  const run = DATA.runs[index];
  const unfinished = `This run is unfinished: ${run.played} of ${run.tasks.length} positions are done.`;
  byId("run-choice").value = index;
  byId("run-state").textContent = run.done ? "" : unfinished;
  drawHeatmap(run, byId("heatmap"));
  drawLedger(run);
  showStream(DATA.plans[run.plan]);
  fillTable(byId("settings"), run.config);
  fillTable(byId("environment"), { ...run.environment, ...costs(run) });
  if (jump) {
    byId("run").scrollIntoView();
    byId("run-choice").focus({ preventScroll: true });
  }
}

function drawDetailPart() {
  setOptions(byId("run-choice"), DATA.runs.map((r) => r.name), bestRun());
  showRun(Number(byId("run-choice").value), false);
}

const startDetail = () => byId("run-choice").addEventListener("change", (e) => showRun(Number(e.target.value), false));
