// Compares two runs: results, settings and environment. By default only differences are shown.
function comparedParts(run) {
  const results = Object.fromEntries(COLUMNS.filter((c) => c.show).map((c) => [c.title, c.show(run[c.key])]));
  return { result: results, setting: run.config, environment: run.environment };
}

function drawDifference() {
  const [a, b] = ["first", "second"].map((id) => DATA.runs[byId(id).value]);
  const [left, right] = [comparedParts(a), comparedParts(b)];
  for (const [id, run, side] of [["first", a, "A"], ["second", b, "B"]]) {
    byId(`${id}-name`).textContent = `${side}: ${run.name}, FAA ${formatNumber(run.faa, 1)}`;
    drawHeatmap(run, byId(`${id}-heatmap`));
  }
  const rows = [];
  const counts = {};
  for (const part of Object.keys(left)) {
    const keys = [...new Set([...Object.keys(left[part]), ...Object.keys(right[part])])];
    const differing = keys.filter((key) => asText(left[part][key]) !== asText(right[part][key]));
    counts[part] = differing.length;
    for (const key of byId("same").checked ? keys : differing) {
      const changed = byId("same").checked && differing.includes(key);
      rows.push(el("tr", { class: changed ? "changed" : null }, el("td", {}, part),
        el("th", { scope: "row" }, key),
        ...[left, right].map((side) => el("td", { class: "fold" }, asText(side[part][key])))));
    }
  }
  const texts = [plural(counts.setting, "setting"), plural(counts.result, "result"), plural(counts.environment, "fact")];
  byId("difference-count").textContent = `${texts[0]}, ${texts[1]} and ${texts[2]} of the environment differ.`;
  const heads = ["what", "", a.name, b.name].map((text) => el("th", { scope: "col", class: "fold" }, text));
  byId("difference").replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}

function drawDifferencePart() {
  const names = DATA.runs.map((r) => r.name);
  const best = DATA.runs[bestRun()];
  const other = DATA.runs.findIndex((r) => r.method !== best.method && r.plan === best.plan);
  setOptions(byId("first"), names, bestRun());
  setOptions(byId("second"), names, other >= 0 ? other : bestRun(1));
  drawDifference();
}

function startDifference() {
  for (const id of ["first", "second", "same"]) byId(id).addEventListener("change", () => { drawDifference(); drawSummary(); });
}
