"use strict";

// What every part of the page uses: the data, elements, numbers as text. Data become text nodes, never HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const MISSING = "–";

// An element with attributes; `style` takes an object, a key that begins with "on" a listener, `text` its text.
function element(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

function drawing(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") node.textContent = value;
    else if (key === "style") for (const [name, set] of Object.entries(value)) node.style.setProperty(name, set);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

// A share in percent with one digit, rounded as the terminal's table is: what is exactly half way to the even digit,
// where toFixed goes away from 0. Half way are only .25, which becomes .2, and .75, which becomes .8 in both.
function percent(share) {
  if (share === null || share === undefined) return MISSING;
  const value = 100 * share;
  return (Math.abs(value % 1) === 0.25 ? value - Math.sign(value) * 0.05 : value).toFixed(1);
}

function whole(number) {
  return number === null || number === undefined ? MISSING : number.toLocaleString("en-US");
}

function share(part, all) {
  return part === null || part === undefined || !all ? null : part / all;
}

// "1 question", "2 questions".
function count(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function typeName(type) {
  return type === null ? "unknown type" : DATA.types[type];
}

// A share as a number and a bar.
function bar(value, kind) {
  const inside = element("span", { class: `fill ${kind}`, style: { width: `${100 * (value ?? 0)}%` } });
  return element(
    "span",
    { class: "bar" },
    element("span", { class: "number", text: percent(value) }),
    element("span", { class: "track", "aria-hidden": "true" }, value === null ? null : inside)
  );
}

function drawHeader() {
  const { questions, right, exact, baselines, answered, predicted } = DATA.summary;
  const tile = (label, value, note) =>
    element(
      "div",
      { class: "tile" },
      element("span", { class: "label", text: label }),
      element("span", { class: "value", text: value }),
      element("span", { class: "note", text: note ?? "" })
    );
  const known = Object.entries(baselines).map(([name, value]) => `${name} ${percent(value)}%`);
  const tiles = [tile("Questions", whole(questions))];
  if (right !== null) tiles.push(tile("Accuracy", `${percent(share(right, questions))}%`, known.join(", ")));
  else tiles.push(tile("Accuracy", "unknown", answered ? "the split has no answers" : "nothing answers"));
  if (right !== null) tiles.push(tile("Wrong answers", whole(questions - right)));
  if (exact !== null) tiles.push(tile("Programs exact", `${percent(share(exact, questions))}%`));
  else if (predicted) tiles.push(tile("Programs exact", "unknown", "the split has no programs"));
  byId("tiles").append(...tiles);
  byId("notes").append(...DATA.notes.map((note) => element("p", { class: "hint", text: note })));
  const list = (pairs) => pairs.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
  byId("facts").append(...list(DATA.facts));
  byId("settings").append(...list(Object.entries(DATA.settings)));
}
