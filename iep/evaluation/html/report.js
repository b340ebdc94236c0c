"use strict";

// Filters the page's questions, which are in the page in their order, and shows some of them at a time.
const STEP = 25;
const PICTURES = JSON.parse(document.getElementById("pictures").textContent);
const more = document.getElementById("more");
const filters = [...document.querySelectorAll("[data-filter]")];
const cards = [...document.querySelectorAll("article")];
const texts = new Map(cards.map((card) => [card, searchable(card)]));
let most = STEP;

function searchable(card) {
  const parts = [...card.querySelectorAll("h3, code, .answers b")].map((part) => part.textContent);
  return [...parts, `#${card.dataset.index}`].join(" ").toLowerCase();
}

function matches(card) {
  return filters.every(({ value, dataset }) => {
    if (value === "") return true;
    if (dataset.filter === "text") return value.toLowerCase().split(/\s+/).every((word) => texts.get(card).includes(word));
    return value.split(",").includes(card.dataset[dataset.filter]);
  });
}

// Show the first `most` questions that match all filters; an empty filter matches all.
function refresh() {
  const found = cards.filter(matches);
  const shown = new Set(found.slice(0, most));
  for (const card of cards) card.hidden = !shown.has(card);
  for (const card of shown) {
    for (const image of card.querySelectorAll("[data-picture]")) image.src = PICTURES[image.dataset.picture];
  }
  const rest = found.length - shown.size;
  document.getElementById("found").textContent = `${found.length} question${found.length === 1 ? "" : "s"} listed`;
  more.hidden = rest === 0;
  more.textContent = `Show ${Math.min(rest, STEP)} more of ${rest}`;
}

function restart() {
  most = STEP;
  refresh();
}

for (const control of filters) control.addEventListener("input", restart);
for (const button of document.querySelectorAll("[data-list]")) {
  button.addEventListener("click", () => {
    for (const control of filters) control.value = control.dataset.filter === button.dataset.list ? button.value : "";
    restart();
    document.getElementById("questions").scrollIntoView();
    document.getElementById("questions").focus({ preventScroll: true });
  });
}
more.addEventListener("click", () => {
  most += STEP;
  refresh();
});
refresh();
