"use strict";

// Sorts the report's tables, and filters, orders and pages its questions. All that it shows is in the page already.
const STEP = 25;
const ORDERS_DOWN = ["probability", "length"]; // the first click on these sorts in descending order
const PICTURES = JSON.parse(byId("pictures").textContent);

function byId(id) {
  return document.getElementById(id);
}

function all(selector, root = document) {
  return [...root.querySelectorAll(selector)];
}

function whole(number) {
  return number.toLocaleString("en-US");
}

// Compare two texts, as numbers where both are; an empty one is last in either direction.
function compare(one, other, isDown) {
  if (!one || !other) return !one - !other;
  const order = isNaN(one) || isNaN(other) ? one.localeCompare(other, "en", { numeric: true }) : one - other;
  return isDown ? -order : order;
}

// Tables: a heading sorts one way, numbers downwards first, then the other way, and at the third click as it was.
for (const table of all("table.statistics")) {
  const rows = [...table.tBodies[0].rows];
  const headings = [...table.tHead.rows[0].cells];
  for (const [column, heading] of headings.entries()) {
    const key = (row) => row.cells[column].dataset.key;
    const orders = ["ascending", "descending"];
    const [first, second] = rows.some((row) => isNaN(key(row) ?? 0)) ? orders : orders.reverse();
    heading.querySelector("button").addEventListener("click", () => {
      const next = { none: first, [first]: second, [second]: "none" }[heading.getAttribute("aria-sort")];
      for (const other of headings) other.setAttribute("aria-sort", other === heading ? next : "none");
      const sorted = [...rows].sort((one, other) => compare(key(one), key(other), next === "descending"));
      table.tBodies[0].append(...(next === "none" ? rows : sorted));
    });
  }
}

// Questions: those that match the filters, in the chosen order, some at a time.
const cards = all("article");
const texts = new Map(cards.map((card) => [card, searchable(card)]));
let filters = {};
let order = { name: "worst", isDown: false };
let found = [];
let shown = 0;

function searchable(card) {
  const parts = all("h3, code, .true, .predicted", card).map((part) => part.textContent);
  return [...parts, `#${card.dataset.index}`].join(" ").toLowerCase();
}

function matches(card) {
  return Object.entries(filters).every(([name, wanted]) => {
    if (name === "text") return wanted.toLowerCase().split(/\s+/).every((word) => texts.get(card).includes(word));
    if (name === "type") return wanted.split(",").includes(card.dataset.type);
    return wanted === card.dataset[name];
  });
}

function key(card) {
  return order.name === "text" ? card.querySelector("h3").textContent : card.dataset[order.name];
}

// List the questions that match the filters; an empty filter matches all.
function list(wanted) {
  filters = Object.fromEntries(Object.entries(wanted).filter(([, value]) => value !== ""));
  for (const control of all("[id^=filter-]")) control.value = filters[control.id.slice("filter-".length)] ?? "";
  refresh();
}

function refresh() {
  found = cards.filter(matches).sort((one, other) => compare(key(one), key(other), order.isDown));
  byId("found").textContent = `${whole(found.length)} question${found.length === 1 ? "" : "s"} listed`;
  for (const button of all("[id^=order-]")) {
    const isPressed = button.id === `order-${order.name}`;
    button.setAttribute("aria-pressed", isPressed);
    button.dataset.arrow = isPressed ? (order.isDown ? " ↓" : " ↑") : "";
  }
  byId("chips").replaceChildren(...chips());
  byId("cards").replaceChildren();
  shown = 0;
  showMore();
}

function chips() {
  const chip = (text, wanted) => {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "chip", textContent: `${text} ✕`, ariaLabel: `Remove: ${text}` });
    button.addEventListener("click", () => list(wanted));
    return button;
  };
  const sides = ["true", "predicted"].filter((name) => name in filters);
  const made = sides.map((name) => chip(`${name}: ${filters[name]}`, { ...filters, [name]: "" }));
  return Object.keys(filters).length ? [...made, chip("all filters", {})] : made;
}

function showMore() {
  const more = found.slice(shown, shown + STEP);
  for (const image of more.flatMap((card) => all("[data-picture]", card))) image.src = PICTURES[image.dataset.picture];
  byId("cards").append(...more);
  shown += STEP;
  const rest = found.length - shown;
  byId("more").hidden = rest <= 0;
  byId("more").textContent = `Show ${Math.min(rest, STEP)} more of ${whole(rest)}`;
  return more;
}

for (const control of all("[id^=filter-]")) {
  control.addEventListener("input", () => list({ ...filters, [control.id.slice("filter-".length)]: control.value }));
}
for (const button of all("[id^=order-]")) {
  const name = button.id.slice("order-".length);
  button.addEventListener("click", () => {
    order = { name, isDown: order.name === name ? !order.isDown : ORDERS_DOWN.includes(name) };
    refresh();
  });
}
for (const button of all("[data-list]")) {
  button.addEventListener("click", () => {
    list(JSON.parse(button.dataset.list));
    byId("questions").focus({ preventScroll: true });
    byId("questions").scrollIntoView({ block: "start" });
  });
}
byId("more").addEventListener("click", () => showMore()[0].querySelector("summary")?.focus());
byId("open-programs").addEventListener("change", (event) => {
  for (const details of cards.flatMap((card) => all("details", card))) details.open = event.target.checked;
});
refresh();
