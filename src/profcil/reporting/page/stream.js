// The stream as a picture: a column per client, a row per position, coloured by task. A full cell is a client that
// trains, a thin line is an idle client. There are two SVG paths per task. With many clients, shares are drawn instead.
const LABEL_WIDTH = 44;
const ROW_HEIGHT = 20;
const AXIS_HEIGHT = 36;
let plan = null;

const taskColour = (task) => viridis(plan.positions > 1 ? task / (plan.positions - 1) : 0.5);
const describeTask = (task) => `task ${task + 1} (classes ${plan.tasks[task].join(", ")})`;

const cellStyle = (task, outline) =>
  `fill:${rgb(taskColour(task))};stroke:var(--soft);stroke-width:${outline}`;

function drawCells(cellWidth) {
  // For every task the SVG paths of [busy, idle] cells.
  const paths = plan.tasks.map(() => ["", ""]);
  const gap = cellWidth > 6 ? 1 : 0;
  plan.rows.forEach((row, client) => row.forEach((code, p) => {
    const [task, idle] = code < 0 ? [-1 - code, 1] : [code, 0];
    const [y, h] = idle ? [p * ROW_HEIGHT + ROW_HEIGHT / 2 - 2, 3] : [p * ROW_HEIGHT + 1, ROW_HEIGHT - 2];
    const [x, w] = [LABEL_WIDTH + client * cellWidth, cellWidth - gap].map((v) => v.toFixed(2));
    paths[task][idle] += `M${x} ${y}h${w}v${h}h-${w}z`;
  }));
  const outline = cellWidth > 6 ? 0.6 : 0; // an outline keeps dark and bright colours visible on any background
  return paths.flatMap((pair, task) => pair.map((d, idle) =>
    svg("path", { d, style: cellStyle(task, idle ? 0.5 : outline) })));
}

function drawNumbers(cellWidth) {
  if (cellWidth < 18) return [];
  return plan.rows.flatMap((row, client) => row.map((code, p) => {
    const place = { x: LABEL_WIDTH + (client + 0.48) * cellWidth, y: p * ROW_HEIGHT + 14, "text-anchor": "middle" };
    return code < 0 ? null : svg("text", { ...place, style: `fill:${textColour(taskColour(code))}` }, code + 1);
  }));
}

function drawShares(width) {
  // With many clients: the share of each task at a position, first clients with data, then idle ones.
  const parts = [];
  plan.tally.forEach(({ busy, idle }, p) => {
    let x = LABEL_WIDTH;
    for (const [counts, thin] of [[busy, false], [idle, true]]) counts.forEach((n, task) => {
      const w = (n / plan.clients) * (width - LABEL_WIDTH);
      const top = p * ROW_HEIGHT;
      const box = thin ? { y: top + ROW_HEIGHT / 2 - 2, height: 3 } : { y: top + 1, height: ROW_HEIGHT - 2 };
      const style = `fill:${rgb(taskColour(task))};stroke:var(--soft);stroke-width:.5`;
      const text = `position ${p + 1}: ${n} clients ${thin ? "idle at" : "train"} ${describeTask(task)}`;
      if (n) parts.push(svg("rect", { x, width: Math.max(w, 0.5), ...box, style }, svg("title", {}, text)));
      x += w;
    });
  });
  return parts;
}

function describeCell(client, position) {
  const code = plan.rows[client][position];
  const what = code < 0 ? `${describeTask(-1 - code)}, idle: no data` : describeTask(code);
  byId("stream-readout").textContent = `client ${client}, position ${position + 1}: ${what}`;
}

function addCursor(picture, cellWidth) {
  // Mouse and arrow keys move a cursor over the cells; the text below describes the cell.
  const size = { width: Math.max(cellWidth, 3), height: ROW_HEIGHT };
  const cursor = svg("rect", { class: "cursor", ...size, visibility: "hidden" });
  const at = { client: 0, position: 0 };
  const move = (client, position) => {
    at.client = Math.max(0, Math.min(plan.clients - 1, client));
    at.position = Math.max(0, Math.min(plan.positions - 1, position));
    setUp(cursor, { x: LABEL_WIDTH + at.client * cellWidth, y: at.position * ROW_HEIGHT, visibility: "visible" }, []);
    describeCell(at.client, at.position);
  };
  picture.append(cursor);
  picture.addEventListener("pointermove", (e) => {
    const box = picture.getBoundingClientRect();
    move(Math.floor((e.clientX - box.left - LABEL_WIDTH) / cellWidth), Math.floor((e.clientY - box.top) / ROW_HEIGHT));
  });
  picture.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (step) { e.preventDefault(); move(at.client + step[0], at.position + step[1]); }
  });
  picture.addEventListener("focus", () => move(at.client, at.position));
}

function streamAxes(width, cellWidth) {
  // "position" along the left side, and clients, or their share, along the bottom.
  const bottom = plan.positions * ROW_HEIGHT;
  const middle = bottom / 2;
  const left = svg("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, "position");
  const step = plan.rows ? Math.max(1, Math.ceil(34 / cellWidth / 5) * (cellWidth >= 34 ? 1 : 5)) : 25;
  const count = plan.rows ? plan.clients : 101;
  const at = (i) => (plan.rows ? LABEL_WIDTH + (i + 0.5) * cellWidth : LABEL_WIDTH + (i / 100) * (width - LABEL_WIDTH));
  const ticks = [...Array(count).keys()].filter((i) => i % step === 0).map((i) => svg("text",
    { x: at(i), y: bottom + 14, "text-anchor": !plan.rows && i === 100 ? "end" : "middle" }, i));
  const title = svg("text", { x: (LABEL_WIDTH + width) / 2, y: bottom + 31, "text-anchor": "middle" },
    plan.rows ? "client" : "clients, %");
  return [plan.positions > 3 ? left : null, ...ticks, title];
}

function drawStream(width) {
  if (!plan) return;
  const cellWidth = plan.rows ? Math.max(3, Math.min(60, (width - LABEL_WIDTH - 2) / plan.clients)) : 0;
  const full = plan.rows ? LABEL_WIDTH + cellWidth * plan.clients + 2 : width;
  const labels = plan.tasks.map((_, p) =>
    svg("text", { x: LABEL_WIDTH - 6, y: p * ROW_HEIGHT + 14, "text-anchor": "end" }, p + 1));
  const title = `${plan.clients} clients over ${plan.positions} positions, coloured by task`;
  const size = { width: full, height: plan.positions * ROW_HEIGHT + AXIS_HEIGHT };
  const picture = svg("svg", { ...size, role: "img", tabindex: plan.rows ? 0 : null, "aria-label": title },
    ...labels, ...streamAxes(full, cellWidth), ...(plan.rows ? [...drawCells(cellWidth), ...drawNumbers(cellWidth)] : drawShares(width)));
  if (plan.rows) addCursor(picture, cellWidth);
  byId("stream").replaceChildren(picture);
  byId("stream-tasks").replaceChildren(...plan.tasks.map((_, task) =>
    el("span", { title: describeTask(task) }, swatch(rgb(taskColour(task))), `task ${task + 1}`)));
}

function showStream(chosen) {
  plan = chosen ?? null;
  if (!plan) {
    for (const id of ["stream", "stream-tasks"]) byId(id).replaceChildren();
    byId("stream-readout").textContent = "This run is a row of a results store, which has no plan of its stream.";
    return;
  }
  const columns = plan.rows ? "a column per client" : `shares of ${plan.clients} clients, with data first`;
  byId("stream-readout").textContent = `A row per position, ${columns}; the colour and number are the task. `
    + "A full cell trains, a thin line is idle (no data).";
  drawStream(Math.floor(byId("stream").clientWidth) || 600);
}

const startStream = () => onResize(byId("stream"), drawStream);
