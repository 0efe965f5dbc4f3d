// The list of runs as a table to sort, filter, group and tick. Without this script the page has a plain table.
"use strict";
const SECONDS = 5;
const NARROW = matchMedia("(max-width: 40rem)").matches;
const SHOWN = NARROW
  ? ["run", "word", "validation"]
  : ["run", "word", "phase", "step", "share", "validation", "evaluated", "tags", "changed"];
const TEXTS = { word: "state", phase: "phase", tags: "tags", note: "note", preset: "preset", corpus: "corpus", changed: "written" };
const NUMBERS = {
  step: "step", share: "done", validation: "validation bits", training: "training bits",
  evaluated: "evaluated", parameters: "parameters", left: "seconds left",
};
const WIDTHS = { run: NARROW ? 120 : 185, word: NARROW ? 85 : 115, step: 70, share: 85, validation: NARROW ? 120 : 125, evaluated: 205, changed: 145, note: 200, corpus: 180 };
const find = (selector) => document.querySelector(selector);
const place = find("#table");
let table, version, known = new Map(), keys = new Set();

// What the table holds of a run: plain values by field. Metrics and options begin with what they are.
function flatten(run) {
  const row = { ...run, tags: run.tags.join(" "), evaluated: run.alone, share: 100 * run.share };
  row.changed = run.changed.slice(0, 16).replace("T", " ");
  row.memory = run.headline && run.headline.value !== run.alone ? `(${run.headline.value.toFixed(3)}) ` : "";
  row.unit = run.headline ? `${run.headline.unit} ${run.headline.split}${run.stale ? ", of another checkpoint" : ""}` : run.warnings[0];
  for (const [name, value] of Object.entries(run.metrics)) if (name !== "step") row[`metric ${name}`] = value;
  for (const [key, value] of Object.entries(run.options)) row[`option ${key}`] = Array.isArray(value) ? value.join(" ") : value;
  return row;
}

const format = (value) =>
  value === null || value === undefined || value === "" ? "" : typeof value !== "number" ? String(value)
  : Number.isInteger(value) ? value.toLocaleString("en") : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));

function makeElement(tag, text, attributes = {}) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.textContent = text;
  return element;
}

// `<2.1`, `>=3`, `=0` compare numbers; any other text is looked for.
const COMPARES = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };
const comparison = (text) => /^\s*(<=|>=|<|>|=)\s*(.*?)\s*$/.exec(text);
function matches(text, value) {
  const parts = comparison(text);
  if (!parts) return format(value).toLowerCase().includes(text.trim().toLowerCase()) || String(value).includes(text.trim());
  const wanted = Number(parts[2]);
  if (parts[2] === "" || Number.isNaN(wanted)) return parts[1] !== "=" || String(value ?? "") === parts[2];
  return typeof value === "number" && COMPARES[parts[1]](value, wanted);
}

function describeFilters() {
  const wrong = table.getHeaderFilters().filter(({ value }) => {
    const parts = comparison(value);
    return parts && parts[1] !== "=" && (parts[2] === "" || Number.isNaN(Number(parts[2])));
  });
  const shown = table.getDataCount("active"), ticked = tickedRuns();
  find("#trouble").textContent = wrong.map(({ value }) => `${value} compares with no number. Use one such as <2.1. `).join("");
  find("#count").textContent = `${shown.toLocaleString("en")} of ${known.size.toLocaleString("en")} runs, ${ticked.shown.length} ticked${ticked.hidden.length ? `, and ${ticked.hidden.length} that are hidden` : ""}`;
  group();
  keepPlace();
}

// What the buttons change: a run that the search hides keeps its tick, and stays as it is.
function tickedRuns() {
  const names = new Set(table.getData("active").map(({ run }) => run)), runs = table.getSelectedData().map(({ run }) => run);
  return { shown: runs.filter((run) => names.has(run)), hidden: runs.filter((run) => !names.has(run)) };
}

// The address has search, grouping, archive and filters, so that a list can be shared. Ticks come back with the page.
function keepPlace() {
  const parameters = new URLSearchParams();
  for (const name of ["search", "group"]) if (find(`#${name}`).value) parameters.set(name, find(`#${name}`).value);
  if (find("#archived").checked) parameters.set("archived", "");
  for (const { field, value } of table.getHeaderFilters()) parameters.set(`filter ${field}`, value);
  const state = { ticked: table.getSelectedData().map(({ run }) => run) }, address = `${location.pathname}${parameters.size ? "?" : ""}${parameters}`;
  if (location.pathname + location.search !== address || JSON.stringify(history.state) !== JSON.stringify(state)) history.replaceState(state, "", address);
}
function restorePlace() {
  const parameters = new URLSearchParams(location.search), { ticked = [] } = history.state ?? {}, fields = table.getColumns().map((column) => column.getField());
  find("#search").value = parameters.get("search") ?? "";
  find("#archived").checked = parameters.has("archived");
  if ([...find("#group").options].some(({ value }) => value === parameters.get("group"))) find("#group").value = parameters.get("group");
  search();
  for (const field of fields.filter((field) => parameters.get(`filter ${field}`))) {
    table.showColumn(field);
    table.setHeaderFilterValue(field, parameters.get(`filter ${field}`));
  }
  table.selectRow(ticked.filter((run) => known.has(run)));
}

function makeColumn(field, title, isNumber) {
  return {
    field, title, hozAlign: isNumber ? "right" : "left", headerHozAlign: isNumber ? "right" : "left", visible: remember("columns", SHOWN).includes(field),
    minWidth: WIDTHS[field] ?? (field.includes(" ") ? 140 : 90), widthGrow: field === "run" ? 3 : 1,
    titleFormatter: (cell) => makeElement("button", cell.getValue(), { type: "button", className: "plain" }),
    // As elements: Tabulator takes a text for HTML.
    formatter: (cell) => formatters[field]?.(cell.getData()) ?? makeElement("span", format(cell.getValue()).replaceAll("\n", " ")),
    tooltip: (_, cell) => makeElement("span", format(cell.getValue()).slice(0, 300)),
    headerFilter: "input", headerFilterFunc: matches, headerFilterLiveFilter: true, headerFilterPlaceholder: isNumber ? "<2.1" : "",
    headerFilterParams: { elementAttributes: { "aria-label": `filter ${field.includes(" ") ? field : title}` } },
    sorter: isNumber ? sortNumbers : "alphanum", sorterParams: { alignEmptyValues: "bottom" },
    // A spreadsheet must not take a text for a formula.
    accessorDownload: (value) => (typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : value),
  };
}
const formatters = {
  run: (row) => {
    const link = makeElement("a", row.run, { href: `${encodeURIComponent(row.run)}/` });
    link.dataset.run = row.run;
    return link;
  },
  word: (row) => makeElement("span", row.word, { className: `tag ${row.word.split(" ").pop()}` }),
  share: (row) => (row.phase ? `${row.share.toFixed(0)} %` : ""),
  evaluated: (row) => {
    const cell = makeElement("span", row.evaluated === null ? "" : row.evaluated.toFixed(3) + " ");
    const title = `${row.unit ?? ""}${row.memory ? "; in brackets with memory" : ""}`;
    cell.append(makeElement("span", row.memory + (row.headline && row.stale ? "outdated" : row.unit ?? ""), { className: "note", title }));
    return cell;
  },
};
for (const field of ["validation", "training"]) formatters[field] = (row) => (row[field] === null ? "" : row[field].toFixed(3));

// Choices of this browser.
function remember(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`haed ${name}${NARROW ? " narrow" : ""}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
function keep(name, value) {
  try {
    localStorage.setItem(`haed ${name}${NARROW ? " narrow" : ""}`, JSON.stringify(value));
  } catch {} // no room, or forbidden: forgotten with the page
}

const meanOf = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;
function describeGroup(value, count, data) {
  const parts = [find("#group").value === "seeds" ? value || "the same options" : `${groupName()} ${value || "none"}`, `${count} run${count > 1 ? "s" : ""}`];
  for (const field of ["validation", "evaluated"]) {
    const rows = data.filter((row) => typeof row[field] === "number"), values = rows.map((row) => row[field]);
    if (!values.length || (field === "evaluated" && new Set(rows.map((row) => row.unit)).size > 1)) continue;
    const mean = meanOf(values);
    const spread = Math.sqrt(values.reduce((sum, each) => sum + (each - mean) ** 2, 0) / (values.length - 1));
    parts.push(`${field} ${mean.toFixed(3)}${values.length > 1 ? ` ± ${spread.toFixed(3)}` : ""} (${values.length})`);
  }
  return makeElement("span", parts.join(" · "));
}

// Numbers are sorted with empty ones last, and groups by the means of their runs.
const means = new Map(); // of the runs that are shown, by field and group
function groupMean(field, row) {
  const key = `${field} ${groupOf(row)}`;
  if (!means.has(key)) {
    const values = table.getData("active").filter((each) => groupOf(each) === groupOf(row) && typeof each[field] === "number").map((each) => each[field]);
    means.set(key, values.length ? meanOf(values) : null);
  }
  return means.get(key);
}
function sortNumbers(one, other, oneRow, otherRow, column, direction) {
  const last = direction === "asc" ? 1 : -1, field = column.getField();
  const compare = (a, b) => (a === b ? 0 : typeof a !== "number" ? last : typeof b !== "number" ? -last : a - b);
  return (grouped && compare(groupMean(field, oneRow.getData()), groupMean(field, otherRow.getData()))) || compare(one ?? null, other ?? null);
}
const groupName = () => find("#group").selectedOptions[0]?.textContent ?? "";
let grouped = "", several = []; // by what, and what varies among the runs that are shown, but for the seed; end to end is another phase
function group() {
  const by = find("#group").value, rows = by === "seeds" ? table.getData("active") : [];
  const fields = ["phase", "preset", "corpus", ...[...keys].filter((key) => key.startsWith("option ") && key !== "option seed")];
  const vary = fields.filter((field) => new Set(rows.map((row) => row[field] ?? null)).size > 1);
  if (by === grouped && String(vary) === String(several)) return;
  [grouped, several] = [by, vary];
  table.setGroupBy(by ? groupOf : false);
  sortAgain();
}
const sortAgain = () => table.setSort(table.getSorters().map(({ field, dir }) => ({ column: field, dir })));
function groupOf(row) {
  const by = find("#group").value;
  if (by !== "seeds") return format(row[by]);
  return several.filter((field) => (row[field] ?? "") !== "").map((field) => `${field.replace("option ", "")}=${row[field]}`).join(" ");
}

// Columns that came with new runs, in the table and among the choices.
async function offerColumns(rows) {
  for (const row of rows)
    for (const field of Object.keys(row)) {
      if (keys.has(field) || !/^(metric|option) /.test(field)) continue;
      keys.add(field);
      await table.addColumn(makeColumn(field, field.slice(7), typeof row[field] === "number"));
      offer(field, field.slice(7), find(`#${field.slice(0, 6)}s`));
      if (field.startsWith("option ")) find("#group").append(makeElement("option", field.slice(7), { value: field }));
    }
  tidyHeaders();
}
function offer(field, title, list) {
  const box = makeElement("input", "", { type: "checkbox", checked: remember("columns", SHOWN).includes(field) });
  const label = makeElement("label", ` ${title}`);
  label.prepend(box);
  list.append(label);
  box.addEventListener("change", () => {
    table[box.checked ? "showColumn" : "hideColumn"](field);
    if (box.checked && !SHOWN.includes(field)) table.moveColumn(field, "run", true); // where it is seen
    keep("columns", [...remember("columns", SHOWN).filter((each) => each !== field), ...(box.checked ? [field] : [])]);
    table.redraw(true);
    tidyHeaders();
  });
}
// Tabulator 6.5 gives headers an attribute that ARIA does not have, and hides its rows from the grid in an element without a role.
function tidyHeaders() {
  place.querySelectorAll("[aria-title]").forEach((each) => each.removeAttribute("aria-title"));
  place.removeAttribute("aria-owns");
  place.querySelector(".tabulator-tableholder").setAttribute("role", "rowgroup");
  place.querySelector(".tabulator-table").setAttribute("role", "presentation");
}

function search() {
  const words = find("#search").value.toLowerCase().split(/\s+/).filter(Boolean), archived = find("#archived").checked;
  table.setFilter((row) => {
    if (row.archived && !archived) return false;
    const text = words.length ? Object.values(row).map((value) => (typeof value === "object" ? "" : String(value))).join(" ").toLowerCase() : "";
    return words.every((word) => text.includes(word));
  });
}

async function fetchRuns() {
  const answer = await fetch("?format=json", { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
  if (answer.status === 304) return null;
  if (!answer.ok) throw new Error(answer.status);
  version = answer.headers.get("ETag");
  return (await answer.json()).map(flatten);
}

async function update() {
  let waiting = SECONDS;
  try {
    const rows = document.hidden ? null : await fetchRuns();
    if (rows) await showRows(rows);
    find("#stale").hidden = true;
  } catch {
    find("#stale").hidden = false; // the server is being started again
    waiting *= 3;
  }
  setTimeout(update, 1000 * waiting);
}

async function showRows(rows) {
  const now = new Map(rows.map((row) => [row.run, JSON.stringify(row)])), focused = document.activeElement?.dataset?.run;
  const gone = [...known.keys()].filter((run) => !now.has(run)), changed = rows.filter((row) => known.get(row.run) !== now.get(row.run));
  const fresh = changed.some((row) => !known.has(row.run));
  known = now;
  await offerColumns(changed);
  if (gone.length) await table.deleteRow(gone);
  const nothing = Object.fromEntries([...keys].map((key) => [key, null])); // of an earlier phase, which would stay
  if (changed.length) await table.updateOrAddData(changed.map((row) => ({ ...nothing, ...row })));
  if (fresh) sortAgain();
  await new Promise((resolve) => setTimeout(resolve, 50)); // the table is drawn later
  if (focused && document.activeElement === document.body) find(`a[data-run="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  describeFilters();
}

async function start() {
  const rows = await fetchRuns();
  known = new Map(rows.map((row) => [row.run, JSON.stringify(row)]));
  for (const row of rows) for (const field of Object.keys(row)) if (/^(metric|option) /.test(field)) keys.add(field);
  const columns = [
    makeColumn("run", "run", false),
    ...Object.entries(TEXTS).map(([field, title]) => makeColumn(field, title, false)),
    ...Object.entries(NUMBERS).map(([field, title]) => makeColumn(field, title, true)),
    ...[...keys].sort().map((key) => makeColumn(key, key.slice(7), rows.some((row) => typeof row[key] === "number"))),
  ];
  // The run, what was chosen, and the usual ones come first.
  const order = ({ field, visible }) => (SHOWN.includes(field) ? SHOWN.indexOf(field) : visible ? 0.5 : SHOWN.length);
  columns.sort((one, other) => order(one) - order(other));
  find("#plain").remove();
  find("#tools").hidden = place.hidden = false;
  const tick = { formatter: "rowSelection", titleFormatter: "rowSelection", titleFormatterParams: { rowRange: "active" } };
  table = new Tabulator(place, {
    data: rows, index: "run", columns, nestedFieldSeparator: false, layout: "fitColumns", maxHeight: "75vh", selectableRows: "highlight",
    rowHeader: { ...tick, headerSort: false, resizable: false, frozen: true, width: 44, hozAlign: "center", headerHozAlign: "center", download: false },
    initialSort: remember("sort", [{ column: "changed", dir: "desc" }]), placeholder: "No run fits the search and the filters.",
    groupToggleElement: "header", groupHeader: describeGroup,
  });
  await new Promise((resolve) => table.on("tableBuilt", resolve));
  for (const [field, title] of Object.entries({ run: "run", ...TEXTS, ...NUMBERS })) if (field !== "run") offer(field, title, find("#metrics"));
  for (const key of [...keys].sort()) offer(key, key.slice(7), find(`#${key.slice(0, 6)}s`));
  for (const key of [...keys].sort()) if (key.startsWith("option ")) find("#group").append(makeElement("option", key.slice(7), { value: key }));
  for (const event of ["dataFiltered", "rowSelectionChanged", "dataProcessed"]) table.on(event, () => setTimeout(describeFilters));
  table.on("dataSorting", () => means.clear());
  table.on("dataSorted", (sorters) => keep("sort", sorters.map(({ field, dir }) => ({ column: field, dir }))));
  place.addEventListener("input", ({ target }) => target.dispatchEvent(new KeyboardEvent("keyup"))); // texts that are pasted count too
  find("#search").addEventListener("input", search);
  find("#archived").addEventListener("change", search);
  find("#group").addEventListener("change", group);
  const choices = find("#tools details");
  addEventListener("pointerdown", ({ target }) => (choices.open &&= choices.contains(target)));
  choices.addEventListener("keydown", ({ key }) => key === "Escape" && ((choices.open = false), choices.firstElementChild.focus()));
  find("#download").addEventListener("click", (event) => {
    event.preventDefault();
    table.download("csv", "runs.csv");
  });
  find("#ticked").addEventListener("submit", (event) => {
    event.target.querySelectorAll("[type=hidden]").forEach((each) => each.remove());
    for (const run of tickedRuns().shown) event.target.append(makeElement("input", "", { type: "hidden", name: "run", value: run }));
  });
  restorePlace();
  tidyHeaders();
  describeFilters();
  setTimeout(update, 1000 * SECONDS);
}

// A page without runs becomes the list when there is one.
async function awaitFirstRun() {
  const rows = await fetchRuns().catch(() => null);
  if (rows?.some((row) => !row.archived)) location.reload();
  else setTimeout(awaitFirstRun, 1000 * SECONDS);
}

if (!place) awaitFirstRun();
else start().catch((error) => (find("#trouble").textContent = `The list cannot be read: ${error.message}. Load the page again.`));
