// While a run trains, asks again how far it is, and shows that; where this is not run, the page says how far it was.
"use strict";
(() => {
const place = document.querySelector("[data-live]");
const SECONDS = 3;

async function again() {
  let waiting = SECONDS;
  try {
    const answer = await fetch(place.dataset.live, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(answer.status);
    const state = await answer.json();
    // All else has changed as well.
    const now = { running: String(state.running), phase: state.phase ?? "", trained: String(state.trained), results: state.results };
    if (Object.keys(now).some((key) => now[key] !== place.dataset[key])) return location.reload();
    place.innerHTML = state.html;
    document.dispatchEvent(new Event("progress")); // see charts.js
    if (!state.running) waiting *= 5;
  } catch (error) {
    waiting *= 5; // the server is being started again, or the run has another name now
    if (!place.querySelector(".stale")) {
      const line = Object.assign(document.createElement("p"), { className: "warning stale", textContent: "The server does not answer for this run. What is shown is of before." });
      line.setAttribute("role", "status");
      place.prepend(line);
    }
  }
  setTimeout(again, 1000 * waiting);
}

const flowRuns = document.querySelector("[data-flow-runs]");

async function listFlowRuns() {
  flowRuns.textContent = "Prefect is asked…";
  try {
    const answer = await fetch(flowRuns.dataset.flowRuns);
    if (!answer.ok) throw new Error(answer.status);
    const table = document.createElement("table");
    for (const each of await answer.json()) {
      const row = table.insertRow(), link = document.createElement("a");
      const bad = ["Failed", "Crashed", "Cancelled", "TimedOut"].includes(each.state);
      link.href = each.address;
      link.textContent = each.name;
      row.insertCell().append(link);
      row.insertCell().append(Object.assign(document.createElement("span"), {
        className: `tag${each.state === "Running" ? " training" : bad ? " stopped" : ""}`, textContent: each.state }));
      row.insertCell().append(new Date(each.date).toLocaleString("sv-SE").slice(0, 16)); // as dates are written elsewhere
      row.cells[2].className = "nowrap note";
    }
    flowRuns.replaceChildren(table.rows.length ? table : "There are none.");
  } catch (error) {
    flowRuns.textContent = "Prefect does not answer. Reload the page to ask again.";
  }
}

if (flowRuns) listFlowRuns();
if (place) setTimeout(again, 1000 * SECONDS);
})();
