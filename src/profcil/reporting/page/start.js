// Draws all sections, from top to bottom.
(function () {
  const unfinished = DATA.runs.filter((r) => !r.done).length;
  const runs = plural(DATA.runs.length, "run") + (unfinished ? `, ${unfinished} of them unfinished` : "");
  const distinct = (key) => new Set(DATA.runs.map((r) => r[key])).size;
  const scope = [plural(distinct("method"), "method"), plural(distinct("dataset"), "dataset"), plural(distinct("seed"), "seed")];
  byId("counts").textContent = `${runs}: ${scope.join(", ")}`;
  byId("notes").hidden = !DATA.notes.length;
  byId("notes").replaceChildren(...DATA.notes.map((note) => el("li", {}, note)));
  startAnswer();
  startDetail();
  startStream();
  startDifference();
  startSummary();
})();
