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
    const found = await answer.json();
    if (String(found.running) !== place.dataset.running) return location.reload(); // all else has changed as well
    place.innerHTML = found.html;
    document.dispatchEvent(new Event("progress")); // see charts.js
    if (!found.running) waiting *= 5;
  } catch (error) {
    waiting *= 5; // the server is being started again
  }
  setTimeout(again, 1000 * waiting);
}

if (place) setTimeout(again, 1000 * SECONDS);
})();
