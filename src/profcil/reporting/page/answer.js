// The answer: for each dataset and setting the methods by mean FAA, the best in bold, and one sentence about the winner.
const RANKED = [["faa", 1], ["cta", 1], ["af", 1], ["norm_comm", 3]];
const LONG = 60; // characters of a name; of a longer one the settings are in small letters
const OCCASIONAL = [["epsilon", 2], ["dropped", 0]]; // where one of the methods has them

function methodCell(group) {
  const settings = group.settings.length ? el("small", {}, group.settings.join(", ")) : null;
  return el("td", { class: "method" }, iconOf(group), el("span", {}, group.title, settings));
}

function valueCell(group, key, places) {
  const value = group.values[key];
  const number = el(group.best.includes(key) ? "b" : "span", {}, value ? formatNumber(value.mean, places) : "–");
  const spread = value && value.sd !== null && key !== "norm_comm" ? el("span", { class: "spread" }, ` ± ${formatNumber(value.sd, places)}`) : null;
  const bar = key === "faa" && value
    ? el("span", { class: "length", style: `width:${Math.max(0, Math.min(100, value.mean))}%;background:${paintOf(group)}` }) : null;
  const tested = key === "faa" && group.p !== null;
  const mark = tested && group.p >= 0.05 ? el("span", { class: "near", title: "not distinguishable from the best" }, " ≈") : null;
  const about = value && value.sd !== null ? `± ${formatNumber(value.sd, places)} over seeds` : null;
  const title = tested ? `${about}; difference from the best: ${pText(group.p)}` : about;
  return el("td", { class: `number ${key}`, title }, number, spread, mark, bar);
}

function rankingTable(groups) {
  const ranked = [...RANKED, ...OCCASIONAL.filter(([key]) => groups.some((group) => group.values[key]))];
  const heads = [el("th", { class: "number rank" }, "#"), el("th", {}, "method"),
    ...ranked.map(([key]) => el("th", { class: "number" }, term(key))), el("th", { class: "number seeds" }, "seeds")];
  const rows = groups.map((group, i) => el("tr", {}, el("td", { class: "number rank" }, i + 1), methodCell(group),
    ...ranked.map(([key, places]) => valueCell(group, key, places)),
    el("td", { class: "number seeds" }, group.seeds.length)));
  return el("table", { class: "ranking" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}

const pText = (p) => (p < 0.001 ? "p < 0.001" : `p = ${p.toPrecision(2)}`);

function reasons([first, second]) {
  // By how much the first is best, how sure that is, and at what traffic.
  const [best, next] = [first, second].map((g) => g && g.values.faa);
  const parts = [];
  if (best && next) {
    const lead = best.mean - next.mean;
    const far = `${formatNumber(lead, 1)} ${formatNumber(lead, 1) === "1.0" ? "point" : "points"} above ${second.label.length > LONG ? `${second.title} with other settings` : second.label}`;
    const spreads = [best.sd, next.sd].filter((sd) => sd !== null);
    const near = spreads.length && lead <= Math.max(...spreads);
    parts.push(second.p !== null ? `${far} (${pText(second.p)})` : near ? `${far}, within one standard deviation` : far);
    if (second.p === null) parts.push("seeds are too few for a test");
  }
  const traffic = first.values.norm_comm;
  if (traffic && first.method !== "fedavg") parts.push(`${traffic.mean.toPrecision(2)} of FedAvg's traffic`);
  return parts.join("; ");
}

function verdict(groups) {
  // The winner and its FAA in large letters, then why.
  const best = groups[0].values.faa;
  if (!best) return el("p", { class: "verdict" }, "No FAA is known.");
  const spread = best.sd === null ? " %" : ` ± ${formatNumber(best.sd, 1)} %`;
  const { label, title } = groups[0];
  const isLong = label.length > LONG;
  const name = el("span", { class: "winner" }, iconOf(groups[0]), isLong ? title : label);
  const about = isLong ? el("span", { class: "reasons" }, groups[0].settings.join(", ")) : null;
  return el("p", { class: "verdict" }, name, el("span", { class: "winner value" }, formatNumber(best.mean, 1)),
    el("span", { class: "hint" }, spread, " ", term("faa")), about, el("span", { class: "reasons" }, reasons(groups)));
}

function rankingCard(setting) {
  const groups = inSetting(setting);
  return el("article", { class: "card ranked", "data-setting": setting }, el("h3", {}, `${view.dataset}, ${setting}`),
    verdict(groups),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Ranking, ${setting}` }, rankingTable(groups)));
}

function overviewCell(title, stream) {
  // The groups of a stream are ordered, so the first one of a method is its best.
  const group = DATA.groups.find((g) => g.title === title && g.stream === stream);
  if (!group || !group.values.faa) return el("td", { class: "number" }, "–");
  const text = formatNumber(group.values.faa.mean, 1);
  const about = `${group.label}: ${formatSpread(group.values.faa, 1)}, ${plural(group.seeds.length, "seed")}`;
  return el("td", { class: "number", title: about }, group.best.includes("faa") ? el("b", {}, text) : text);
}

function overviewTable() {
  // FAA of every method, a row per stream, if there are several datasets.
  const streams = [...new Set(DATA.groups.map((g) => g.stream))];
  const titles = [...new Set(DATA.groups.map((g) => g.title))];
  const icon = (title) => iconOf({ ...DATA.groups.find((g) => g.title === title), variant: 0 });
  const heads = titles.map((title) => el("th", { class: "number", scope: "col" }, icon(title), el("br"), title));
  const rows = streams.map((stream) => el("tr", {}, el("th", { scope: "row" }, stream),
    ...titles.map((title) => overviewCell(title, stream))));
  return el("table", { class: "ranking" }, el("thead", {}, el("tr", {}, el("th", {}, "stream"), ...heads)), el("tbody", {}, ...rows));
}

function drawAnswer() {
  byId("rankings").replaceChildren(...settingsInView().map(rankingCard));
}

function definitions() {
  return Object.values(DATA.names).flatMap(({ short, long }) => [el("dt", {}, short), el("dd", {}, long)]);
}

function chooseDataset(name) {
  view.dataset = name;
  for (const button of byId("datasets").children) button.setAttribute("aria-pressed", String(button.dataset.name === name));
  drawAnswer();
  drawLegend();
  drawCharts();
  drawWhy();
}

function drawAnswerPart() {
  byId("definitions").replaceChildren(...definitions());
  byId("no-answer").hidden = DATA.groups.length > 0;
  for (const section of document.querySelectorAll(".needs-groups")) section.hidden = !DATA.groups.length;
  if (!DATA.groups.length) return;
  const several = datasets().length > 1;
  byId("overview").hidden = !several;
  byId("datasets").hidden = !several;
  if (several) byId("overview-table").replaceChildren(overviewTable());
  byId("datasets").replaceChildren(...datasets().map((name) =>
    el("button", { type: "button", "data-name": name, onclick: () => chooseDataset(name) }, name)));
  chooseDataset(datasets().includes(view.dataset) ? view.dataset : datasets()[0]);
}
