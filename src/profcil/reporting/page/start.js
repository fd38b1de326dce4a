// Draws all sections, from top to bottom; a served page draws them again when it has new data.
function drawHeader() {
  const unfinished = DATA.runs.filter((r) => !r.done).length;
  const runs = plural(DATA.runs.length, "run") + (unfinished ? `, ${unfinished} of them unfinished` : "");
  const distinct = (key) => new Set(DATA.runs.map((r) => r[key])).size;
  const scope = [plural(distinct("method"), "method"), plural(distinct("dataset"), "dataset"), plural(distinct("seed"), "seed")];
  byId("counts").textContent = DATA.runs.length ? `${runs}: ${scope.join(", ")}` : "no finished run yet";
  byId("notes").hidden = !DATA.notes.length;
  byId("notes").replaceChildren(...DATA.notes.map((note) => el("li", {}, note)));
}

function drawPage() {
  drawHeader();
  drawAnswerPart();
  for (const section of document.querySelectorAll(".needs-runs")) section.hidden = !DATA.runs.length;
  if (!DATA.runs.length) return;
  drawDetailPart();
  drawDifferencePart();
  drawSummaryPart();
}

startSummary();
startDetail();
startStream();
startDifference();
drawPage();
