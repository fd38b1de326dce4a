// What is computed now: only on a page that `profcil serve` shows. It asks for the state of all runs every two seconds.
const INTERVAL = 2000;
const FINISHED_SHOWN = 6;
const cards = new Map(); // path of a run -> its card, which is changed in place
let live = JSON.parse(byId("live").textContent);
let answered = Date.now(); // when the server last answered

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text; // so that a selected text stays selected
}

function formatTime(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h} h ${two(m)} min` : m ? `${m} min ${two(s)} s` : `${s} s`;
}

const ago = (run) => Math.max(0, live.time - run.changed);

function progressText(run) {
  if (!run.total) return `${run.stage === "before the stream" ? "warm-up" : run.stage}: the stream has not begun`;
  const position = Math.min(run.positions, Math.floor(run.done / run.rounds) + 1);
  const round = run.done - (position - 1) * run.rounds;
  const where = `position ${position} of ${run.positions}`;
  return round ? `${where}, round ${round} of ${run.rounds}` : `${where}, first of ${run.rounds} rounds`;
}

function leftText(run) {
  if (run.state === "stopped") return `stopped ${formatTime(ago(run))} ago`;
  if (run.left === null) return "";
  const round = run.seconds / run.done;
  return `about ${formatTime(run.left - Math.min(ago(run), round))} left`; // the round that is computed now counts at most once
}

function sparkline(run) {
  // FAA after each position so far; the width stands for the whole stream.
  const [width, height, edge] = [132, 40, 5];
  const x = (p) => edge + (p / Math.max(1, run.positions - 1)) * (width - 2 * edge);
  const y = (v) => height - edge - (v / 100) * (height - 2 * edge);
  const known = run.curve.map((v, p) => [p, v]).filter(([, v]) => v !== null);
  const line = known.map(([p, v]) => `${x(p).toFixed(1)} ${y(v).toFixed(1)}`).join("L");
  const dots = known.slice(-1).map(([p, v]) => drawMarker({ ...run, variant: 0 }, x(p), y(v), 3.5));
  return svg("svg", { width, height, role: "img", "aria-label": "FAA after each position", class: "spark" },
    svg("path", { class: "grid", d: `M${edge} ${y(0)}H${width - edge}` }),
    known.length > 1 ? svg("path", { d: `M${line}`, style: `fill:none;stroke:${paintOf(run)};stroke-width:2` }) : null, ...dots);
}

function progressBar(run) {
  // A part per position.
  const parts = [...Array(run.positions || 1).keys()].map((p) => {
    const share = run.total ? Math.max(0, Math.min(1, run.done / run.rounds - p)) : 0;
    return el("span", {}, el("i", { style: `width:${100 * share}%;background:${paintOf(run)}` }));
  });
  const now = run.total ? Math.round((100 * run.done) / run.total) : 0;
  return el("div", { class: "steps", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": now,
    "aria-label": "rounds done" }, ...parts);
}

function makeCard(run) {
  // The fields that change are kept under their names.
  const field = (tag, name) => el(tag, { class: name });
  const parts = { badge: field("span", "badge"), value: field("b", "value"), bar: field("div", "progress"), curve: field("div", "curve"),
    where: field("span", "where"), left: field("span", "left"), facts: field("p", "facts"), advice: field("p", "advice"),
    sites: field("p", "sites"), label: field("span", "label") };
  const names = el("div", { class: "names" },
    el("h3", {}, iconOf({ ...run, variant: 0 }), " ", parts.label, " ", parts.badge),
    el("p", { class: "hint" }, `${run.dataset}, ${run.setting}, seed ${run.seed} · ${run.name}`));
  const score = el("div", { class: "score" }, parts.value, el("span", { class: "hint" }, term("faa"), " so far, %"), parts.curve);
  const node = el("article", { class: "card now" }, names, score, parts.bar,
    el("p", { class: "line" }, parts.where, parts.left), parts.facts, parts.sites, parts.advice);
  return { node, parts };
}

function factsOf(run) {
  const facts = [["CTA", formatNumber(run.cta, 1)], ["AF", formatNumber(run.af, 1)], ["sent", formatBytes(run.bytes)],
    ["loss", run.loss === null ? "–" : Number(run.loss.toPrecision(2)).toString()], ["time", formatTime(run.seconds)]];
  return facts.flatMap(([name, value]) => [el("span", {}, `${name} `, el("b", {}, value))]);
}

function sitesText({ answered, silent, left_out: out, problems }) {
  const kinds = Object.entries(problems).map(([kind, count]) => `${kind} ${count}`);
  const parts = [`last request: ${plural(answered, "site")} replied`, silent ? `${silent} did not` : "",
    kinds.length ? `problems: ${kinds.join(", ")}` : "", ...out.map((text) => `left out: ${text}`)];
  return parts.filter(Boolean).join("; ");
}

function fillCard({ node, parts }, run) {
  node.dataset.state = run.state;
  node.dataset.path = run.path;
  setText(parts.label, run.label);
  setText(parts.badge, run.state);
  setText(parts.value, formatNumber(run.faa, 1));
  setText(parts.where, progressText(run));
  setText(parts.left, leftText(run));
  parts.bar.replaceChildren(progressBar(run));
  parts.curve.replaceChildren(sparkline(run));
  parts.facts.replaceChildren(...factsOf(run));
  parts.sites.hidden = !run.sites;
  if (run.sites) setText(parts.sites, sitesText(run.sites));
  parts.advice.hidden = !run.advice;
  if (run.advice && !parts.advice.textContent.includes(run.advice)) {
    parts.advice.replaceChildren("To continue: ", el("code", {}, run.advice));
  }
}

function drawCards() {
  const order = { running: 0, stopped: 1 };
  const shown = live.runs.filter((r) => r.state in order)
    .sort((a, b) => order[a.state] - order[b.state] || a.name.localeCompare(b.name, "en", { numeric: true })); // cards stay in place
  for (const run of shown) if (!cards.has(run.path)) cards.set(run.path, makeCard(run));
  for (const run of shown) fillCard(cards.get(run.path), run);
  const nodes = shown.map((run) => cards.get(run.path).node);
  const list = byId("now-runs");
  if (nodes.length !== list.children.length || nodes.some((node, i) => list.children[i] !== node)) list.replaceChildren(...nodes);
}

function drawFinished() {
  // The runs that were finished last.
  const done = live.runs.filter((r) => r.state === "done").sort((a, b) => b.changed - a.changed).slice(0, FINISHED_SHOWN);
  byId("now-finished").hidden = !done.length;
  byId("now-finished-runs").replaceChildren(...done.map((run) => el("li", {}, iconOf({ ...run, variant: 0 }),
    el("span", {}, `${run.label}, ${run.dataset}, ${run.setting}, seed ${run.seed}`), el("b", {}, formatNumber(run.faa, 1)),
    el("span", { class: "hint" }, `${formatTime(ago(run))} ago`))));
}

function drawNow() {
  const count = (state) => live.runs.filter((r) => r.state === state).length;
  for (const state of ["running", "stopped", "done"]) {
    setText(byId(`count-${state}`), String(count(state)));
    byId(`count-${state}`).parentElement.hidden = state === "stopped" && !count(state);
  }
  byId("now-empty").hidden = live.runs.length > 0;
  drawCards();
  drawFinished();
  const running = live.runs.filter((r) => r.state === "running");
  document.title = running.length ? `${running.length} running · ${byId("title").textContent}` : byId("title").textContent;
}

function drawHeard(failed) {
  byId("connection").dataset.failed = String(failed);
  const seconds = Math.round((Date.now() - answered) / 1000);
  setText(byId("connection-text"), failed ? `the server has not answered for ${formatTime(seconds)}` : "live");
}

async function fetchJson(name) {
  const answer = await fetch(name, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.json();
}

async function update() {
  try {
    live = await fetchJson("live.json");
    answered = Date.now();
    drawNow();
    if (live.version !== DATA.version) {
      DATA = await fetchJson("data.json");
      drawPage();
    }
    drawHeard(false);
  } catch {
    drawHeard(true);
  }
  setTimeout(update, INTERVAL);
}

document.querySelector("nav").prepend(el("a", { href: "#now" }, "Now"), " ");
drawNow();
drawHeard(false);
setTimeout(update, INTERVAL);
