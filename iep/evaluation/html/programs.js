// True and predicted program of a question side by side, as indented trees with their differences marked.
const KINDS = ["", "filled-in", "ignored", "not-used"];
const REMARKS = {
  "filled-in": "not in the program, which ends before it is complete: the engine takes the scene.",
  ignored: "after the tree is complete: it does not run.",
  "not-used": "its value is of another kind than what is to take it, an attention or an encoding: the scene's stands in its place.",
};

function drawPrograms(question) {
  const both = DATA.summary.exact !== null;
  if (!question.program && !question.predicted) return element("p", { class: "empty", text: "No programs." });
  const trueLines = question.program ?? [];
  const predicted = question.predicted ?? (both ? trueLines : []);
  const same = (lines) => lines.map((_, at) => [at, at]);
  const rows = question.rows ?? same(trueLines.length ? trueLines : predicted);
  const columns = [];
  if (question.program) columns.push(["True program", trueLines, 0]);
  if (question.predicted || both) columns.push(["Predicted program", predicted, 1]);
  const head = element("tr", {}, ...columns.map(([title]) => element("th", { scope: "col", text: title })));
  const lines = rows.map((row) => {
    const differs = question.rows !== null && !equal(trueLines[row[0]], predicted[row[1]]);
    const cells = columns.map(([, of, side]) => programCell(of[row[side]], differs, side));
    return element("tr", { class: differs ? "differs" : null }, ...cells);
  });
  const table = element("table", { class: "programs" }, element("thead", {}, head), element("tbody", {}, ...lines));
  const remarks = [...new Set(predicted.map((line) => KINDS[line[2]]))].filter((kind) => kind);
  return element(
    "div",
    { class: "scroll" },
    table,
    ...remarks.map((kind) => element("p", { class: "hint" }, element("b", { text: `${kind.replace("-", " ")}: ` }), REMARKS[kind]))
  );
}

// The same token of the same kind, however deep.
function equal(one, other) {
  return Boolean(one && other && one[1] === other[1] && one[2] === other[2]);
}

function programCell(line, differs, side) {
  if (!line) return element("td", { class: "gap" });
  const [depth, token, kind] = line;
  const mark = differs ? element(side ? "ins" : "del", { text: DATA.functions[token] }) : DATA.functions[token];
  const code = element("code", { class: KINDS[kind] || null }, mark);
  const note = kind ? element("small", { text: ` ${KINDS[kind].replace("-", " ")}` }) : null;
  return element("td", { style: { "--depth": String(depth) } }, code, note);
}
