// Accuracies by type, family and length: tables whose headings sort and whose rows list their questions.

// A table. Columns: {label, note, key(row) -> value to sort by, cell(row, is sorted) -> node or text, kind:
// "number", "share" or "text"}. Rows may be `inner` or `outer` ones of a group.
function sortable(caption, columns, rows, name) {
  const body = element("tbody");
  const state = { column: null, descending: true };
  const headings = columns.map((column, place) => {
    const button = element(
      "button",
      { type: "button", onclick: () => sortBy(place) },
      column.label,
      column.note ? element("small", { text: column.note }) : null
    );
    return element("th", { scope: "col", class: columnClass(column), "aria-sort": "none" }, button);
  });
  // A heading sorts one way, the other way, and at the third click as it was.
  function sortBy(place) {
    const first = columns[place].kind !== "text";
    if (state.column !== place) Object.assign(state, { column: place, descending: first });
    else if (state.descending === first) state.descending = !first;
    else state.column = null;
    headings.forEach((heading, other) => {
      const sorted = other === state.column ? (state.descending ? "descending" : "ascending") : "none";
      heading.setAttribute("aria-sort", sorted);
    });
    fill();
  }
  function fill() {
    const shown = state.column === null ? rows : sorted(rows, columns[state.column].key, state.descending);
    const line = (row) => {
      const cells = columns.map((column, place) => {
        const content = column.cell(row, state.column !== null);
        const attributes = { class: columnClass(column), scope: place ? null : "row" };
        return element(place ? "td" : "th", attributes, content);
      });
      return element("tr", { class: row.inner && state.column === null ? "inner" : row.outer ? "outer" : null }, ...cells);
    };
    body.replaceChildren(...shown.map(line));
  }
  fill();
  const head = element("thead", {}, element("tr", {}, ...headings));
  const table = element("table", { class: `statistics ${name}` }, element("caption", { text: caption }), head, body);
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
}

function columnClass(column) {
  return { number: "numeric", share: "numeric share", text: null }[column.kind];
}

// Rows in the order of a key; those without a value last, equal ones as they were.
function sorted(rows, key, descending) {
  const sign = descending ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  const empty = (value) => value === null || value === undefined;
  return [...rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    return sign * compare(a, b);
  });
}

function goodColumns() {
  const columns = [];
  if (DATA.summary.right !== null) columns.push(goodColumn("Accuracy", "right"));
  if (DATA.summary.exact !== null) columns.push(goodColumn("Programs exact", "exact"));
  return columns;
}

function goodColumn(label, part) {
  const value = (row) => share(row[part], row.questions);
  return { label, key: value, cell: (row) => bar(value(row), part), kind: "share" };
}

function questionsColumn() {
  return { label: "Questions", key: (row) => row.questions, cell: (row) => whole(row.questions), kind: "number" };
}

function listingButton(text, filters, title) {
  return element("button", { type: "button", class: "link", title, onclick: () => listQuestions(filters), text });
}

function drawByType() {
  const { rows, others } = DATA.byType;
  if (!rows.length) {
    byId("by-type").append(element("p", { class: "empty", text: "Question types are unknown: there are no programs." }));
    return;
  }
  const summary = DATA.summary;
  const overall = { label: "overall", outer: true, types: null, others: others.map((other) => other.overall), ...summary };
  const name = {
    label: "Type",
    key: fullName,
    cell: (row, flat) => listingButton(flat ? fullName(row) : row.label, { type: row.types ? row.types.join(",") : "" }),
    kind: "text",
  };
  function fullName(row) {
    return row.types?.length === 1 ? typeName(row.types[0]) : row.label;
  }
  const columns = others.map((other, place) => ({
    label: other.name,
    note: other.note,
    key: (row) => row.others[place],
    cell: (row) => bar(row.others[place], "other"),
    kind: "share",
  }));
  const all = [overall, ...rows.map((row) => ({ ...row, outer: row.types.length > 1 }))];
  const table = sortable("By question type", [name, questionsColumn(), ...goodColumns(), ...columns], all, "by-type");
  byId("by-type").append(table);
  const single = rows.filter((row) => row.types.length === 1);
  const known = single.reduce((sum, row) => sum + row.questions, 0);
  if (known < summary.questions) {
    const text = `${count(summary.questions - known, "question")} of unknown type: counted in “overall” alone.`;
    byId("by-type").append(element("p", { class: "hint", text }));
  }
}

function drawByFamily() {
  const place = byId("by-family");
  if (!DATA.byFamily.length) {
    place.append(element("p", { class: "empty", text: "Question families are unknown: the split does not name them." }));
    return;
  }
  const name = {
    label: "Family",
    key: (row) => row.key,
    cell: (row) => listingButton(String(row.key), { family: String(row.key) }),
    kind: "text",
  };
  const example = {
    label: "Its first question",
    key: (row) => row.example,
    cell: (row) => element("span", { class: "example" }, row.example, element("small", { text: typeName(row.type) })),
    kind: "text",
  };
  place.append(sortable("By question family", [name, questionsColumn(), ...goodColumns(), example], DATA.byFamily, "by-family"));
}

function drawByLength() {
  const place = byId("by-length");
  if (!DATA.byLength.length) {
    place.append(element("p", { class: "empty", text: "Lengths of programs are unknown: there are no programs." }));
    return;
  }
  const name = {
    label: "Functions",
    key: (row) => row.key,
    cell: (row) => listingButton(String(row.key), { length: String(row.key) }),
    kind: "text",
  };
  place.append(sortable(`By length of the ${DATA.lengthsOf} program, “scene” not counted`, [name, questionsColumn(), ...goodColumns()], DATA.byLength, "by-length"));
}
