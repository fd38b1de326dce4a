// Two runs side by side: results, settings and environment, by default only where they differ.
function facets(run) {
  const results = Object.fromEntries(COLUMNS.filter((c) => c.show).map((c) => [c.title, c.show(run[c.key])]));
  return { result: results, setting: run.config, environment: run.environment };
}

function drawDifference() {
  const [a, b] = ["first", "second"].map((id) => DATA.runs[byId(id).value]);
  const [left, right] = [facets(a), facets(b)];
  const rows = [];
  const counts = {};
  for (const part of Object.keys(left)) {
    const keys = [...new Set([...Object.keys(left[part]), ...Object.keys(right[part])])];
    const apart = keys.filter((key) => shown(left[part][key]) !== shown(right[part][key]));
    counts[part] = apart.length;
    for (const key of byId("same").checked ? keys : apart) {
      rows.push(el("tr", { class: byId("same").checked && apart.includes(key) ? "changed" : null }, el("td", {}, part),
        el("th", { scope: "row" }, key),
        ...[left, right].map((side) => el("td", { class: "fold" }, shown(side[part][key])))));
    }
  }
  const many = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const told = [many(counts.setting, "setting"), many(counts.result, "result"), many(counts.environment, "fact")];
  byId("difference-count").textContent = `${told[0]}, ${told[1]} and ${told[2]} of the environment differ.`;
  const heads = ["what", "", a.name, b.name].map((text) => el("th", { scope: "col", class: "fold" }, text));
  byId("difference").replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}

function startDifference() {
  const names = DATA.runs.map((r) => r.name);
  options(byId("first"), names, 0);
  const rival = DATA.runs.findIndex((r) => r.method !== DATA.runs[0].method && r.plan === DATA.runs[0].plan);
  options(byId("second"), names, rival > 0 ? rival : Math.min(1, names.length - 1));
  for (const id of ["first", "second", "same"]) byId(id).addEventListener("change", drawDifference);
  drawDifference();
}
