// The table of runs: sorted by any column, filtered by words, averaged over seeds.
const COLUMNS = [
  { key: "name", title: "run", text: (r) => r.name },
  { key: "method", title: "method", text: (r) => r.method },
  { key: "dataset", title: "dataset", text: (r) => r.dataset },
  { key: "setting", title: "setting", text: (r) => r.setting },
  { key: "seed", title: "seed", number: true, text: (r) => String(r.seed) },
  ...[["faa", "FAA", 1], ["cta", "CTA", 1], ["af", "AF", 1], ["norm_comm", "NormComm", 3]].map(numeric),
  { key: "bytes_down", title: "down", number: true, show: formatBytes },
  { key: "bytes_up", title: "up", number: true, show: formatBytes },
  ...[["seconds", "seconds", 1], ["warmup_seconds", "warm-up s", 1], ["peak_memory_mb", "peak MB", 0]].map(numeric),
  { key: "state", title: "state", text: (r) => (r.done ? "finished" : `unfinished: ${r.played} of ${r.tasks.length}`) },
];
const sorting = { key: null, down: false };

function numeric([key, title, places]) {
  return { key, title, number: true, show: (value) => formatNumber(value, places) };
}

const textOf = (column, row) => (column.text ? column.text(row) : column.show(row[column.key]));

function averageRows() {
  // A row per group of equal settings: the mean of each number, and its standard deviation.
  return DATA.groups.map((group) => {
    const members = group.members.map((i) => DATA.runs[i]);
    const row = { ...members[0], name: group.label, seed: `${members.length} seeds`, spread: {} };
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
  const texts = (row) => [...COLUMNS.filter((c) => c.text).map((c) => c.text(row)), `seed${row.seed}`];
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
  const kind = { name: "fold", state: row.done ? null : "unfinished" }[column.key];
  return el("td", { class: column.number ? "number" : kind }, text);
}

function drawSummary() {
  const all = byId("average").checked ? averageRows() : DATA.runs;
  const rows = sortRows(filterRows(all));
  const makeRow = (row) => el("tr", {}, ...COLUMNS.map((c) => makeCell(c, row)));
  byId("summary").tBodies[0].replaceChildren(...rows.map(makeRow));
  byId("shown").textContent = `${rows.length} of ${all.length} shown`;
  for (const head of byId("summary").tHead.rows[0].cells) {
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

function startSummary() {
  const heads = COLUMNS.map((c) =>
    el("th", { scope: "col", "data-key": c.key, class: c.number ? "number" : null },
      el("button", { type: "button", onclick: () => sortBy(c) }, c.title)));
  byId("summary").tHead.rows[0].replaceChildren(...heads);
  byId("filter").addEventListener("input", drawSummary);
  byId("average").addEventListener("change", drawSummary);
  drawSummary();
}
