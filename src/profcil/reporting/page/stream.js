// The stream as a picture: a column per client, a row per position, coloured by task. A full cell trains, a thin line
// is an idle cell. Two paths per task, however many clients there are; beyond the limit, shares instead of clients.
const LABEL = 26;
const LINE = 20;
let plan = null;

const taskColour = (task) => ramp(plan.positions > 1 ? task / (plan.positions - 1) : 0.5);
const classes = (task) => `task ${task + 1} (classes ${plan.tasks[task].join(", ")})`;

function cells(wide) {
  // [busy, idle] path data for every task.
  const paths = plan.tasks.map(() => ["", ""]);
  const gap = wide > 6 ? 1 : 0;
  plan.rows.forEach((row, client) => row.forEach((code, p) => {
    const [task, idle] = code < 0 ? [-1 - code, 1] : [code, 0];
    const [y, h] = idle ? [p * LINE + LINE / 2 - 2, 3] : [p * LINE + 1, LINE - 2];
    const [x, w] = [LABEL + client * wide, wide - gap].map((v) => v.toFixed(2));
    paths[task][idle] += `M${x} ${y}h${w}v${h}h-${w}z`;
  }));
  const rim = wide > 6 ? 0.6 : 0; // the scale runs from dark to bright: a rim keeps its ends visible on any paper
  return paths.flatMap((pair, task) => pair.map((d, idle) =>
    svg("path", { d, style: `fill:${rgb(taskColour(task))};stroke:var(--soft);stroke-width:${idle ? 0.5 : rim}` })));
}

function numbersIn(wide) {
  if (wide < 18) return [];
  return plan.rows.flatMap((row, client) => row.map((code, p) => {
    const place = { x: LABEL + (client + 0.48) * wide, y: p * LINE + 14, "text-anchor": "middle" };
    return code < 0 ? null : svg("text", { ...place, style: `fill:${inkOn(taskColour(code))}` }, code + 1);
  }));
}

function shares(width) {
  // Many clients: how large a part of them has which task at a position, with data first, then idle ones.
  const parts = [];
  plan.tally.forEach(({ busy, idle }, p) => {
    let x = LABEL;
    for (const [counts, thin] of [[busy, false], [idle, true]]) counts.forEach((n, task) => {
      const w = (n / plan.clients) * (width - LABEL);
      const box = thin ? { y: p * LINE + LINE / 2 - 2, height: 3 } : { y: p * LINE + 1, height: LINE - 2 };
      const style = `fill:${rgb(taskColour(task))};stroke:var(--soft);stroke-width:.5`;
      const told = `position ${p + 1}: ${n} clients ${thin ? "idle at" : "train"} ${classes(task)}`;
      if (n) parts.push(svg("rect", { x, width: Math.max(w, 0.5), ...box, style }, svg("title", {}, told)));
      x += w;
    });
  });
  return parts;
}

function tell(client, position) {
  const code = plan.rows[client][position];
  const what = code < 0 ? `${classes(-1 - code)}, idle: no data` : classes(code);
  byId("stream-readout").textContent = `client ${client}, position ${position + 1}: ${what}`;
}

function pointing(picture, wide) {
  // Mouse and arrow keys move one cursor over the cells and say what is there.
  const cursor = svg("rect", { class: "cursor", width: Math.max(wide, 3), height: LINE, visibility: "hidden" });
  const at = { client: 0, position: 0 };
  const move = (client, position) => {
    at.client = Math.max(0, Math.min(plan.clients - 1, client));
    at.position = Math.max(0, Math.min(plan.positions - 1, position));
    fill(cursor, { x: LABEL + at.client * wide, y: at.position * LINE, visibility: "visible" }, []);
    tell(at.client, at.position);
  };
  picture.append(cursor);
  picture.addEventListener("pointermove", (e) => {
    const box = picture.getBoundingClientRect();
    move(Math.floor((e.clientX - box.left - LABEL) / wide), Math.floor((e.clientY - box.top) / LINE));
  });
  picture.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (step) { e.preventDefault(); move(at.client + step[0], at.position + step[1]); }
  });
  picture.addEventListener("focus", () => move(at.client, at.position));
}

function drawStream(width) {
  if (!plan) return;
  const wide = plan.rows ? Math.max(3, Math.min(60, (width - LABEL - 2) / plan.clients)) : 0;
  const full = plan.rows ? LABEL + wide * plan.clients + 2 : width;
  const labels = plan.tasks.map((_, p) => svg("text", { x: LABEL - 6, y: p * LINE + 14, "text-anchor": "end" }, p + 1));
  const title = `${plan.clients} clients over ${plan.positions} positions, coloured by task`;
  const size = { width: full, height: plan.positions * LINE + 2 };
  const picture = svg("svg", { ...size, role: "img", tabindex: plan.rows ? 0 : null, "aria-label": title },
    ...labels, ...(plan.rows ? [...cells(wide), ...numbersIn(wide)] : shares(width)));
  if (plan.rows) pointing(picture, wide);
  byId("stream").replaceChildren(picture);
  byId("stream-tasks").replaceChildren(...plan.tasks.map((_, task) =>
    el("span", { title: classes(task) }, swatch(rgb(taskColour(task))), `task ${task + 1}`)));
}

function showStream(chosen) {
  plan = chosen;
  const columns = plan.rows ? "a column per client" : `shares of ${plan.clients} clients, with data first`;
  byId("stream-readout").textContent = `A row per position, ${columns}; the colour and number say which task is met. `
    + "A full cell trains, a thin line is idle: no data.";
  drawStream(Math.floor(byId("stream").clientWidth) || 600);
}

const startStream = () => onResize(byId("stream"), drawStream);
