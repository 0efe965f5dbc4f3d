// Curves of one run or several, to look into. Without this script the page of a run has them as pictures.
"use strict";
(() => {
const box = document.querySelector("#chart");
if (!box) return;
const tools = box.querySelector(".toolbar"), plot = box.querySelector(".plot");
const control = (name) => tools.querySelector(`[name=${name}]`);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const wide = () => box.clientWidth - 16; // without padding and edges
let series = [], version = "", drawn = null, zoomed = false;

async function read() {
  const answer = await fetch(box.dataset.curves, { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
  if (answer.status === 304 || !answer.ok) return;
  version = answer.headers.get("ETag");
  series = await answer.json();
  const metrics = [...new Set(series.map((each) => each.metric))].sort(), chosen = control("metric").value;
  if (!metrics.length) return;
  control("metric").replaceChildren(...metrics.map((name) => new Option(name.replaceAll("_", " "), name)));
  const usual = metrics.includes("bits_per_token") ? "bits_per_token" : metrics.includes("iem") ? "iem" : metrics[0];
  control("metric").value = metrics.includes(chosen) ? chosen : usual;
  tools.hidden = false;
  box.querySelector(".curves").hidden = true;
  draw(true);
}

// Exponential moving average, each point weighted as if the average had begun with the line.
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return sum / total;
  });
}

// What was zoomed into stays while values are added, and is left when something else is drawn.
function draw(keepsZoom = false) {
  const zoom = keepsZoom && drawn && zoomed ? Object.fromEntries(["x", "y"].map((name) => [name, { min: drawn.scales[name].min, max: drawn.scales[name].max }])) : null;
  const x = control("x").value, weight = Number(control("smooth").value), log = control("log").checked;
  const skipped = Math.min(99, Math.max(0, Number(control("skip").value) || 0)) / 100;
  const chosen = series.filter((each) => each.metric === control("metric").value);
  const runs = [...new Set(series.map((each) => each.run))], palette = Number(colour("--palette")) || 8;
  const lines = [], tables = [];
  for (const each of chosen) {
    const late = each.value.map((value, i) => i).filter((i) => each.share[i] > skipped || (each.validation && each.share[i] >= skipped));
    const kept = (late.length ? late : each.value.map((_, i) => i)).filter((i) => !log || each.value[i] > 0);
    if (!kept.length) continue;
    const values = kept.map((i) => each.value[i]);
    tables.push([kept.map((i) => each[x][i]), each.validation ? values : smooth(values, weight)]);
    const place = runs.length > 1 ? runs.indexOf(each.run) : ["pretrain", "finetune", "train"].indexOf(each.phase.split(" ")[0]);
    lines.push({
      label: [runs.length > 1 ? each.run : "", each.phase, each.validation ? "validation" : ""].filter(Boolean).join(" "),
      stroke: colour(`--line${(Math.max(0, place) % palette) + 1}`), width: each.validation ? 1 : 1.6, dash: each.validation ? [4, 3] : undefined, spanGaps: true,
      points: { show: each.validation || kept.length === 1, size: 6 }, value: (_, value) => (value === null || value === undefined ? "–" : String(+value.toPrecision(5))),
    });
  }
  drawn?.destroy();
  drawn = null;
  plot.setAttribute("aria-label", `${control("metric").value} over ${control("x").selectedOptions[0].textContent}: ${lines.map((line) => line.label).join(", ")}`);
  if (!tables.length) return plot.replaceChildren(`No value of ${control("metric").value}${log ? " above 0" : ""} to draw.`);
  plot.replaceChildren();
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const short = (_, values) => values.map((value) => (value === null ? "" : Math.abs(value) >= 1e6 ? value.toExponential(1) : value.toLocaleString("en", { maximumSignificantDigits: 5 })));
  drawn = new uPlot({
    width: wide(), height: 320, scales: { x: { time: false }, y: { distr: log ? 3 : 1 } }, cursor: { drag: { x: true, y: true, uni: 20 } },
    axes: [{ ...axis, label: control("x").selectedOptions[0].textContent, labelSize: 20, values: short }, { ...axis, size: 64, values: short }],
    series: [{ label: control("x").selectedOptions[0].textContent, value: (_, value) => (value === null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 5 })) }, ...lines],
    hooks: { setSelect: [() => (zoomed = true)] },
  }, uPlot.join(tables), plot);
  drawn.over.addEventListener("dblclick", () => (zoomed = false)); // by which uPlot shows all again
  zoomed = Boolean(zoom);
  if (zoom) for (const [name, range] of Object.entries(zoom)) drawn.setScale(name, range);
}

tools.addEventListener("input", () => draw());
addEventListener("resize", () => drawn?.setSize({ width: wide(), height: 320 }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
document.addEventListener("progress", read);
read();
})();
