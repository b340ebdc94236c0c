// True against predicted answers: a table of counts, the darker the larger their share of the row.

function drawConfusion() {
  const place = byId("confusion-table");
  const confusion = DATA.confusion;
  if (confusion === null) {
    const why = DATA.summary.answered ? "The split has no answers to compare with." : "Nothing answers.";
    place.append(element("p", { class: "empty", text: why }));
    return;
  }
  const counts = new Map(confusion.cells.map(([true_, predicted, number]) => [`${true_},${predicted}`, number]));
  const answers = confusion.order.map(([answer]) => answer);
  const starts = confusion.order.map(([, group], at) => at > 0 && group !== confusion.order[at - 1][1]);
  const rows = answers.filter((answer) => answers.some((other) => counts.has(`${answer},${other}`)));
  const named = (answer) => DATA.answers[answer];
  const edge = (at) => (starts[at] ? "start" : null);
  const head = element(
    "tr",
    {},
    element("th", { class: "corner", text: "true ↓ predicted →" }),
    ...answers.map((answer, at) => element("th", { scope: "col", class: edge(at) }, element("span", { text: named(answer) })))
  );
  const lines = rows.map((answer) => {
    const total = answers.reduce((sum, other) => sum + (counts.get(`${answer},${other}`) ?? 0), 0);
    const cells = answers.map((other, at) => {
      const number = counts.get(`${answer},${other}`);
      if (number === undefined) return element("td", { class: edge(at) });
      return element("td", { class: edge(at) }, cell(answer, other, number, total));
    });
    const start = edge(answers.indexOf(answer));
    return element("tr", { class: start }, element("th", { scope: "row", text: named(answer) }), ...cells);
  });
  function cell(answer, other, number, total) {
    const part = number / total;
    const words = `true ${named(answer)}, predicted ${named(other)}: ${whole(number)}, ${percent(part)}% of ${named(answer)}`;
    return element("button", {
      type: "button",
      class: answer === other ? "cell right" : "cell wrong",
      tabindex: "-1",
      title: words,
      "aria-label": words,
      "data-true": answer,
      "data-predicted": other,
      style: { "--share": `${Math.round(100 * Math.sqrt(part))}%` },
      onclick: () => listQuestions({ true: String(answer), predicted: String(other) }),
      text: String(number),
    });
  }
  const table = element("table", { class: "confusion" }, element("thead", {}, head), element("tbody", {}, ...lines));
  const hint = "Counts of questions; the shade is a count's share of its row. A cell lists its questions; arrow keys move between cells.";
  place.append(
    element("p", { class: "hint", text: hint }),
    element("div", { class: "scroll", role: "region", "aria-label": "Confusion of answers" }, table)
  );
  moveByArrows(table);
}

// One cell can be reached with the tab key, the others from it with the arrow keys.
function moveByArrows(table) {
  const cells = [...table.querySelectorAll("button.cell")];
  if (!cells.length) return;
  cells[0].tabIndex = 0;
  const spot = (cell) => [cell.closest("tr").rowIndex, cell.closest("td").cellIndex];
  table.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !event.target.matches("button.cell")) return;
    event.preventDefault();
    const [row, column] = spot(event.target);
    const ahead = cells
      .map((cell) => ({ cell, at: spot(cell) }))
      .filter(({ at }) => (step[0] ? at[1] === column && (at[0] - row) * step[0] > 0 : at[0] === row && (at[1] - column) * step[1] > 0))
      .sort((a, b) => Math.abs(a.at[0] - row) + Math.abs(a.at[1] - column) - Math.abs(b.at[0] - row) - Math.abs(b.at[1] - column));
    if (ahead.length) focusCell(ahead[0].cell);
  });
  table.addEventListener("focusin", (event) => event.target.matches("button.cell") && focusCell(event.target));
  function focusCell(next) {
    cells.forEach((cell) => (cell.tabIndex = cell === next ? 0 : -1));
    if (document.activeElement !== next) next.focus();
  }
}
