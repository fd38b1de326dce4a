// Why: how well the memory follows the features, what the features still hold, and which tasks were forgotten.
const EXPLAINED = [["centred", "alignment", 3], ["probe_warm", "probe, warm", 1], ["probe_end", "probe, end", 1], ["faa", "FAA", 1]];

function explanationTable(groups) {
  const known = EXPLAINED.filter(([key]) => groups.some((g) => g.values[key]));
  const heads = [el("th", {}, "method"), ...known.map(([, title]) => el("th", { class: "number" }, title))];
  const rows = groups.map((g) => el("tr", {}, methodCell(g),
    ...known.map(([key, , places]) => el("td", { class: "number" }, formatSpread(g.values[key], places)))));
  return el("table", { class: "ranking" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}

function forgettingCell(value, final, task) {
  if (value === null) return el("td", { class: "none", title: `task ${task + 1}: no score` }, "–");
  const paint = viridis(1 - Math.max(0, Math.min(100, value)) / 100);
  const style = `background:${rgb(paint)};color:${textColour(paint)}`;
  const title = `task ${task + 1}: ${value.toFixed(1)} points lost, ${formatNumber(final, 1)} % at the end`;
  return el("td", { style, title }, value.toFixed(0));
}

function forgettingTable(groups) {
  const count = Math.max(...groups.map((g) => g.forgetting.mean.length));
  const heads = [...Array(count).keys()].map((t) => el("th", { scope: "col" }, t + 1));
  const rows = groups.map((g) => el("tr", {}, el("th", { scope: "row", class: "method" }, iconOf(g), el("span", {}, g.label)),
    ...g.forgetting.mean.map((value, task) => forgettingCell(value, g.final.mean[task], task))));
  return el("table", { class: "heatmap" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "task"), ...heads)),
    el("tbody", {}, ...rows));
}

function scrolling(label, ...children) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);
}

function forgettingCard(setting) {
  const groups = inSetting(setting).filter((g) => g.forgetting);
  const title = "points lost by task (best accuracy after any position − final)";
  return groups.length ? whyCard(setting, title, scrolling(`Forgetting by task, ${setting}`, forgettingTable(groups))) : null;
}

function explanationCard(setting) {
  const groups = inSetting(setting).filter((g) => g.values.centred || g.values.probe_end);
  const table = () => scrolling(`Alignment and probes, ${setting}`, explanationTable(groups));
  return groups.length ? whyCard(setting, "memory and features at the end", table()) : null;
}

function alignmentCard(setting) {
  return inSetting(setting).some((g) => g.alignment) ? panel("alignment", setting, LINES.alignment.title) : null;
}

function whyCard(setting, title, child) {
  return el("article", { class: "card" }, el("p", { class: "caption" }, el("b", {}, setting), ` · ${title}`), child);
}

function drawWhy() {
  const cards = [forgettingCard, explanationCard, alignmentCard].flatMap((draw) => settingsInView().map(draw));
  const parts = cards.filter(Boolean);
  byId("why-panels").classList.toggle("triple", settingsInView().length === 1);
  byId("why-panels").replaceChildren(...parts);
  const without = parts.length ? "" : "These runs have no scores by task. ";
  const probed = inView().some((g) => g.values.probe_end);
  const measure = probed ? [] : ["No run here has a probe; ", el("code", {}, "profcil diagnose RUN"), " measures one of a base."];
  byId("why-hint").replaceChildren(without, ...measure);
}
