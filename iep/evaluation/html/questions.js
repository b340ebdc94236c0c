// The listed questions: filters, orders, and one card for each.
const STEP = 25;
const NO_FILTERS = { type: "", family: "", length: "", answer: "", program: "", true: "", predicted: "", text: "" };
const listing = { filters: { ...NO_FILTERS }, order: "worst", descending: false, shown: STEP, open: false };

// Orders: [label, what to sort by, whether the first click sorts downwards].
const ORDERS = {
  worst: ["Worst first", (question) => worst(question), false],
  probability: ["Probability", (question) => question.ranked?.[0][1] ?? null, true],
  index: ["Number", (question) => question.index, false],
  type: ["Type", (question) => typeName(question.type), false],
  length: ["Program length", (question) => question.length, true],
  text: ["Text", (question) => question.text, false],
};

// Wrong answers, most confident first; then wrong programs; then the rest, least confident first.
function worst(question) {
  const confidence = question.ranked?.[0][1] ?? 0;
  if (question.right === false) return 0 + (1 - confidence) / 2;
  if (question.exact === false) return 1 + (1 - confidence) / 2;
  return 2 + confidence / 2;
}

function matches(question, filters) {
  const is = (wanted, value) => wanted === "" || wanted === String(value);
  const good = (wanted, value) => wanted === "" || (value !== null && (wanted === "right") === value);
  const words = filters.text.toLowerCase().split(/\s+/).filter(Boolean);
  return (
    (filters.type === "" || filters.type.split(",").includes(String(question.type))) &&
    is(filters.family, question.family) &&
    is(filters.length, question.length) &&
    good(filters.answer, question.right) &&
    good(filters.program, question.exact) &&
    is(filters.true, question.answer) &&
    is(filters.predicted, question.ranked?.[0][0]) &&
    words.every((word) => searchable(question).includes(word))
  );
}

const texts = new Map();

function searchable(question) {
  if (!texts.has(question)) {
    const tokens = [...(question.program ?? []), ...(question.predicted ?? [])].map((line) => DATA.functions[line[1]]);
    const answers = [question.answer, question.ranked?.[0][0]].map((answer) => DATA.answers[answer] ?? "");
    texts.set(question, [question.text, `#${question.index}`, ...answers, ...tokens].join(" ").toLowerCase());
  }
  return texts.get(question);
}

// List the questions of one kind, whatever was listed before, and go there.
function listQuestions(filters) {
  listing.filters = { ...NO_FILTERS, ...filters };
  fillControls();
  refresh();
  byId("questions").focus({ preventScroll: true });
  byId("questions").scrollIntoView({ block: "start" });
}

function choices(name, label, options) {
  const select = element("select", {
    id: `filter-${name}`,
    onchange: (event) => {
      listing.filters[name] = event.target.value;
      refresh();
    },
  });
  select.append(...[["", "all"], ...options].map(([value, text]) => element("option", { value, text })));
  return element("label", { class: "control" }, element("span", { text: label }), select);
}

function drawQuestions() {
  const { byType, byFamily, byLength, summary } = DATA;
  const controls = [];
  const nested = (row) => [row.types.join(","), row.inner ? `– ${row.label}` : row.label];
  if (byType.rows.length) controls.push(choices("type", "Type", byType.rows.map(nested)));
  if (byFamily.length) controls.push(choices("family", "Family", byFamily.map((row) => [String(row.key), `${row.key}: ${row.example}`])));
  if (byLength.length) controls.push(choices("length", "Functions", byLength.map((row) => [String(row.key), String(row.key)])));
  const good = [["right", "right"], ["wrong", "wrong"]];
  if (summary.right !== null) controls.push(choices("answer", "Answer", good));
  if (summary.exact !== null) controls.push(choices("program", "Program", good));
  const search = element("input", {
    type: "search",
    id: "filter-text",
    placeholder: "words, an answer, filter_color[red], #12",
    oninput: (event) => {
      listing.filters.text = event.target.value;
      refresh();
    },
  });
  controls.push(element("label", { class: "control wide" }, element("span", { text: "Search" }), search));
  const orders = Object.entries(ORDERS).map(([name, [label]]) =>
    element("button", { type: "button", id: `order-${name}`, "aria-pressed": "false", onclick: () => orderBy(name) }, label)
  );
  const open = element("input", {
    type: "checkbox",
    id: "open-programs",
    onchange: (event) => {
      listing.open = event.target.checked;
      byId("cards").querySelectorAll("details").forEach((details) => (details.open = listing.open));
    },
  });
  byId("listing").append(
    element("p", { class: "hint", text: listedHint() }),
    element("div", { class: "controls" }, ...controls),
    element(
      "div",
      { class: "orders", role: "group", "aria-label": "Order" },
      ...orders,
      element("label", { class: "check" }, open, " programs open")
    ),
    element("div", { class: "found" }, element("p", { id: "found", role: "status" }), element("span", { id: "chips" })),
    element("div", { id: "cards" }),
    element("button", { type: "button", id: "more", class: "more", onclick: showMore })
  );
  refresh();
}

function listedHint() {
  const { given, problems } = DATA.images;
  const all = DATA.summary.questions;
  const listed = DATA.questions.length;
  const some = `Listed are ${whole(listed)} of ${whole(all)} questions: in turn the wrong answers and the wrong programs, most confident first, some of every cell above, and some of every family.`;
  const none = `None of ${count(all, "question")} is listed (--report-questions 0).`;
  const which = listed === all ? "All questions are listed." : listed ? some : none;
  const without = given ? "" : " No images were given (--images).";
  const lost = problems.length ? ` ${count(problems.length, "image")} could not be shown, such as: ${problems[0]}.` : "";
  return which + without + lost;
}

function orderBy(name) {
  if (listing.order === name) listing.descending = !listing.descending;
  else Object.assign(listing, { order: name, descending: ORDERS[name][2] });
  refresh();
}

function fillControls() {
  for (const name of Object.keys(NO_FILTERS)) {
    const control = byId(`filter-${name}`);
    if (control) control.value = listing.filters[name];
  }
}

// How many of all questions evaluated the filters let through, where that is known without listing all of them.
function inSplit(filters) {
  const set = Object.keys(filters).filter((name) => filters[name] !== "");
  if (DATA.questions.length === DATA.summary.questions) return null;
  if (!set.length) return DATA.summary.questions;
  const cell = DATA.confusion?.cells.find(([answer, predicted]) => String(answer) === filters.true && String(predicted) === filters.predicted);
  if (set.length === 2 && cell) return cell[2];
  if (set.length > 1) return null;
  const row = {
    type: () => DATA.byType.rows.find((one) => one.types.join(",") === filters.type),
    family: () => DATA.byFamily.find((one) => String(one.key) === filters.family),
    length: () => DATA.byLength.find((one) => String(one.key) === filters.length),
    answer: () => part(filters.answer, DATA.summary.right),
    program: () => part(filters.program, DATA.summary.exact),
  }[set[0]]?.();
  return row?.questions ?? null;

  function part(wanted, good) {
    return { questions: wanted === "right" ? good : DATA.summary.questions - good };
  }
}

function refresh() {
  listing.shown = STEP;
  const [, key] = ORDERS[listing.order];
  const found = sorted(DATA.questions.filter((question) => matches(question, listing.filters)), key, listing.descending);
  listing.found = found;
  const all = inSplit(listing.filters);
  byId("found").textContent = count(found.length, "question") + (all === null ? "" : ` of ${whole(all)} evaluated`);
  for (const [name, [label]] of Object.entries(ORDERS)) {
    const pressed = name === listing.order;
    byId(`order-${name}`).setAttribute("aria-pressed", String(pressed));
    byId(`order-${name}`).textContent = label + (pressed ? (listing.descending ? " ↓" : " ↑") : "");
  }
  drawChips();
  byId("cards").replaceChildren(...found.slice(0, STEP).map(card));
  showRest();
}

function drawChips() {
  const { true: answer, predicted } = listing.filters;
  const chip = (text, names) =>
    element("button", { type: "button", class: "chip", "aria-label": `Remove: ${text}`, onclick: () => listQuestions({ ...listing.filters, ...names }) }, `${text} ✕`);
  const chips = [];
  if (answer !== "") chips.push(chip(`true: ${DATA.answers[answer]}`, { true: "" }));
  if (predicted !== "") chips.push(chip(`predicted: ${DATA.answers[predicted]}`, { predicted: "" }));
  if (Object.values(listing.filters).some((value) => value !== "")) chips.push(chip("all filters", NO_FILTERS));
  byId("chips").replaceChildren(...chips);
}

function showMore() {
  const more = listing.found.slice(listing.shown, listing.shown + STEP).map(card);
  listing.shown += STEP;
  byId("cards").append(...more);
  showRest();
  more[0]?.querySelector("summary")?.focus();
}

function showRest() {
  const rest = listing.found.length - listing.shown;
  byId("more").hidden = rest <= 0;
  byId("more").textContent = `Show ${Math.min(rest, STEP)} more of ${whole(rest)}`;
}

function card(question) {
  const facts = [
    `#${question.index}`,
    `image ${question.image}`,
    question.type === null ? null : typeName(question.type),
    question.family === null ? null : `family ${question.family}`,
    question.length === null ? null : count(question.length, "function"),
  ].filter((fact) => fact !== null);
  const state = question.right === null ? "unknown" : question.right ? "right" : "wrong";
  return element(
    "article",
    { class: `card ${state}`, "data-index": question.index },
    picture(question),
    element(
      "div",
      { class: "body" },
      element("h3", { text: question.text }),
      element("p", { class: "meta", text: facts.join(" · ") }),
      answerLine(question),
      programDetails(question)
    )
  );
}

function picture(question) {
  const source = question.picture === null ? null : DATA.images.pictures[question.picture];
  if (!source && !DATA.images.given) return null;
  const shown = source
    ? element("img", { src: source, alt: `Image ${question.image}`, loading: "lazy" })
    : element("div", { class: "no-picture", text: `no image ${question.image}` });
  return element("div", { class: "frame" }, shown);
}

function answerLine(question) {
  const line = element("p", { class: "answers" });
  const named = (answer) => DATA.answers[answer];
  if (question.answer !== null) line.append(element("span", {}, "true: ", element("b", { class: "true", text: named(question.answer) })));
  if (question.ranked) {
    const [[answer, probability], ...others] = question.ranked;
    const verdict = question.right === null ? "" : question.right ? " ✓" : " ✗";
    const text = `${named(answer)}${verdict}`;
    const state = question.right === null ? "unknown" : question.right ? "right" : "wrong";
    line.append(element("span", {}, "predicted: ", element("b", { class: `predicted ${state}`, text }), ` ${percent(probability)}%`));
    const rest = others.map(([other, value]) => `${named(other)} ${percent(value)}%`).join(", ");
    if (rest) line.append(element("span", { class: "rest", text: `then ${rest}` }));
  }
  return line;
}

function programDetails(question) {
  if (!question.program && !question.predicted) return null;
  const verdict = question.exact === null ? "Program" : question.exact ? "Program right" : "Program wrong";
  const details = element("details", { class: "program" }, element("summary", { class: question.exact === false ? "wrong" : null, text: verdict }));
  details.addEventListener("toggle", () => {
    if (details.open && !details.querySelector("table")) details.append(drawPrograms(question));
  });
  details.open = listing.open;
  return details;
}
