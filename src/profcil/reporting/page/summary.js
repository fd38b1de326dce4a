// The table of runs: sorted by any column, filtered by words, averaged over seeds.
const columns = () => [
  { key: "name", title: "run", text: (r) => r.name },
  ...[["faa", "FAA", 1], ["cta", "CTA", 1], ["af", "AF", 1], ["norm_comm", "NormComm", 3]].map(numeric),
  { key: "method", title: "method", text: (r) => r.title + (r.variant ? ` (${r.variant})` : "") },
  { key: "dataset", title: "dataset", text: (r) => r.dataset },
  { key: "setting", title: "setting", text: (r) => r.setting },
  { key: "seed", title: "seed", number: true, text: (r) => String(r.seed) },
  { key: "bytes_total", title: "sent", number: true, show: formatBytes },
  ...[["seconds", "seconds", 1]].map(numeric),
  ...(DATA.runs.every((r) => r.done) ? [] : [{ key: "state", title: "state", text: (r) => (r.done ? "done" : `unfinished: ${r.played} of ${r.tasks.length}`) }]),
];
let COLUMNS = columns();
const picked = new Set(); // the sides of the comparison that were chosen here
const sorting = { key: null, down: false };

function numeric([key, title, places]) {
  return { key, title, number: true, show: (value) => formatNumber(value, places) };
}

const textOf = (column, row) => (column.text ? column.text(row) : column.show(row[column.key]));

function averageRows() {
  // A row per group of equal settings: the mean of each number, and its standard deviation.
  return DATA.groups.map((group) => {
    const members = group.members.map((i) => DATA.runs[i]);
    const row = { ...members[0], name: group.label, seed: plural(members.length, "seed"), spread: {} };
    for (const { key } of COLUMNS.filter((c) => c.show)) {
      const known = members.map((m) => m[key]).filter((v) => v !== null);
      const mean = known.reduce((a, b) => a + b, 0) / known.length;
      row[key] = known.length === members.length ? mean : null;
      const squares = known.reduce((a, b) => a + (b - mean) ** 2, 0);
      row.spread[key] = known.length > 1 && !key.startsWith("bytes") ? Math.sqrt(squares / (known.length - 1)) : null;
    }
    return row;
  });
}

function sortRows(rows) {
  const column = COLUMNS.find((c) => c.key === sorting.key);
  if (!column) return rows;
  const value = (row) => (column.number ? row[column.key] : textOf(column, row));
  const rank = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null); // unknown values are last in both directions
    return sorting.down ? rank(y, x) : rank(x, y);
  });
}

function filterRows(rows) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = (row) => [...COLUMNS.filter((c) => c.text).map((c) => c.text(row)), row.config.method, `seed${row.seed}`];
  const searched = (row) => texts(row).join(" ").toLowerCase();
  return rows.filter((row) => words.every((word) => searched(row).includes(word)));
}

function makeCell(column, row) {
  if (column.key === "name" && !row.spread) {
    const open = () => showRun(DATA.runs.indexOf(row), true);
    return el("td", { class: "fold" }, el("button", { type: "button", onclick: open }, row.name));
  }
  const spread = row.spread && column.show && row.spread[column.key] !== null && row[column.key] !== null;
  const text = textOf(column, row) + (spread ? ` ± ${column.show(row.spread[column.key])}` : "");
  const kind = { name: "fold", method: "wrap", dataset: "wrap", setting: "wrap", state: row.done ? null : "unfinished" }[column.key];
  return el("td", { class: column.number ? "number" : kind }, text);
}

function pickCell(row) {
  // Buttons that put a run on one side of the comparison.
  const index = DATA.runs.indexOf(row);
  const pick = (id) => { byId(id).value = index; drawDifference(); drawSummary(); };
  const button = (id, text) => el("button", { type: "button", class: "pick", "aria-label": `compare ${row.name} as ${text}`,
    "aria-pressed": String(picked.has(id) && Number(byId(id).value) === index),
    onclick: () => { picked.add(id); pick(id); } }, text);
  return el("td", { class: "picks" }, button("first", "A"), button("second", "B"));
}

function drawPicked() {
  const names = ["first", "second"].map((id) => DATA.runs[byId(id).value].name);
  byId("picked").replaceChildren(...(picked.size
    ? [`A: ${names[0]}, B: ${names[1]} `, el("a", { href: "#differences" }, "side by side")] : []));
}

function drawSummary() {
  const all = byId("average").checked ? averageRows() : DATA.runs;
  const rows = sortRows(filterRows(all));
  const makeRow = (row) => el("tr", {}, ...COLUMNS.map((c) => makeCell(c, row)), row.spread ? el("td", {}) : pickCell(row));
  byId("summary").tBodies[0].replaceChildren(...rows.map(makeRow));
  byId("shown").textContent = `${rows.length} of ${all.length} shown`;
  drawPicked();
  for (const head of byId("summary").querySelectorAll("thead th[data-key]")) {
    const sorted = head.dataset.key === sorting.key;
    head.setAttribute("aria-sort", sorted ? (sorting.down ? "descending" : "ascending") : "none");
  }
}

function sortBy(column) {
  // Numbers start with the largest, texts with A. The same column again reverses the order.
  sorting.down = sorting.key === column.key ? !sorting.down : Boolean(column.number);
  sorting.key = column.key;
  drawSummary();
}

function drawSummaryPart() {
  COLUMNS = columns();
  const heads = COLUMNS.map((c) =>
    el("th", { scope: "col", "data-key": c.key, class: c.number ? "number" : null },
      el("button", { type: "button", onclick: () => sortBy(c), title: DATA.names[c.key]?.long }, c.title)));
  byId("summary").tHead.rows[0].replaceChildren(...heads, el("th", { scope: "col", class: "plain" }, "compare"));
  drawSummary();
}

function startSummary() {
  byId("filter").addEventListener("input", drawSummary);
  byId("average").addEventListener("change", drawSummary);
}
