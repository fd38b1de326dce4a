// Draws all sections, from top to bottom.
(function () {
  const unfinished = DATA.runs.filter((r) => !r.done).length;
  const count = DATA.runs.length === 1 ? "1 run" : `${DATA.runs.length} runs`;
  byId("counts").textContent = unfinished ? `${count}, ${unfinished} of them unfinished` : count;
  byId("notes").hidden = !DATA.notes.length;
  byId("notes").replaceChildren(...DATA.notes.map((note) => el("li", {}, note)));
  startSummary();
  startCurves();
  startDetail();
  startStream();
  startDifference();
})();
