// The boxes of questions: chunks are completed as one types, each line that is pasted has a box, and Ctrl+Enter sends.
"use strict";
(() => {
const list = document.querySelector("datalist[data-chunks]");
const boxes = document.querySelector(".boxes");
let waiting = 0;

async function complete(typed) {
  const response = await fetch(`${list.dataset.chunks}?begin=${encodeURIComponent(typed)}`).catch(() => null);
  if (!response?.ok) return; // without an index there is nothing to propose; the answer says so
  const options = await response.json();
  list.replaceChildren(...options.map(({ text, count }) => new Option(`${count.toLocaleString("en")} times`, text)));
}

function addBox() { // an empty one after the last, as long as there may be more
  const all = boxes.querySelectorAll("[name=query]"), last = all[all.length - 1];
  if (!last.value || all.length >= boxes.dataset.most) return null;
  const more = last.cloneNode();
  more.removeAttribute("id"); more.removeAttribute("autofocus");
  more.value = ""; more.setAttribute("aria-label", "another chunk");
  last.after(more);
  return more;
}

document.addEventListener("input", ({ target }) => {
  if (target.dataset.most) { // the server refuses longer texts, and an address cannot hold much longer ones
    const size = [...target.value].length, most = Number(target.dataset.most);
    target.setCustomValidity(size > most ? `${size.toLocaleString("en")} characters. Give at most ${most.toLocaleString("en")}.` : "");
  }
  if (!target.list) return;
  addBox();
  clearTimeout(waiting);
  waiting = setTimeout(complete, 150, target.value);
});

document.addEventListener("paste", (event) => {
  const lines = event.clipboardData.getData("text").split(/\r?\n/).filter(Boolean);
  if (event.target.name !== "query" || lines.length < 2) return;
  event.preventDefault();
  let box = event.target, rest = lines;
  while (box && rest.length) {
    box.value += rest[0];
    rest = rest.slice(1);
    box = [...boxes.querySelectorAll("[name=query]")].find((each) => !each.value) ?? addBox();
  }
  const left = rest.length ? `${rest.length} of ${lines.length} lines were left out. Ask at most ${boxes.dataset.most} chunks at once.` : "";
  event.target.setCustomValidity(left);
  event.target.reportValidity();
  event.target.setCustomValidity("");
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.matches("textarea")) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
});
if (document.querySelector("textarea")) document.querySelectorAll("[data-hint]").forEach((each) => { each.hidden = false; });

async function lookForMap() {
  const response = await fetch(location.pathname, { method: "HEAD" }).catch(() => null);
  if (response?.redirected) location.replace(response.url + location.hash);
  else if (response && !response.ok) location.reload();
  else setTimeout(lookForMap, 1000);
}
if (document.querySelector("[data-making]")) setTimeout(lookForMap, 1000);
})();
