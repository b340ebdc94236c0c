// Curves of the runs that the checkpoints come from, with the values under the pointer or, with arrow keys, at a step.
const CHART = { width: 560, height: 240, left: 48, right: 12, top: 10, bottom: 26 };

function drawRuns() {
  const place = byId("runs");
  if (!DATA.training.length) place.append(element("p", { class: "empty", text: "No checkpoints are known." }));
  for (const run of DATA.training) {
    const title = element("h3", {}, `${run.parts.join(" and ")}: `, element("code", { text: run.path }));
    const charts = Object.entries(run.charts).map(([name, curves]) => chart(name, curves));
    const content = charts.length
      ? [element("div", { class: "charts" }, ...charts)]
      : [element("p", { class: "empty", text: "No metrics.jsonl with training curves beside this checkpoint." })];
    if (run.averaged > 1) content.push(element("p", { class: "hint", text: `A point is the mean of up to ${run.averaged} recorded ones.` }));
    place.append(element("div", { class: "run" }, title, ...content));
  }
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

// Round numbers from below `low` to above `high`, about `wanted` of them.
function ticks(low, high, wanted) {
  const rough = (high - low || Math.abs(high) || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: Math.max(last - first, 1) + 1 }, (_, at) => (first + at) * step);
}

function short(value) {
  if (Math.abs(value) >= 1e4) return `${Number((value / 1000).toPrecision(4))}k`;
  return String(Number(value.toPrecision(3)));
}

function chart(title, curves) {
  const names = Object.keys(curves);
  const points = Object.values(curves).flat();
  const steps = extent(points.map(([step]) => step));
  const isShare = title === "Accuracy";
  const levels = isShare ? [0, 0.25, 0.5, 0.75, 1] : ticks(...extent(points.map(([, value]) => value)), 4);
  const [low, high] = [levels[0], levels[levels.length - 1]];
  const { width, height, left, right, top, bottom } = CHART;
  const isOne = steps[0] === steps[1]; // a single step: in the middle
  const x = (step) => left + (isOne ? 0.5 : (step - steps[0]) / (steps[1] - steps[0])) * (width - left - right);
  const y = (value) => top + ((high - value) / (high - low || 1)) * (height - top - bottom);
  const shown = (value) => (isShare ? `${percent(value)}%` : short(value));
  const grid = levels.flatMap((level) => [
    drawing("line", { class: "grid", x1: left, x2: width - right, y1: y(level), y2: y(level) }),
    drawing("text", { class: "tick", x: left - 6, y: y(level) + 4, "text-anchor": "end", text: isShare ? `${100 * level}%` : short(level) }),
  ]);
  const marks = isOne ? [steps[0]] : ticks(...steps, 5).filter((step) => step > steps[0] - 1e-9 && step < steps[1] + 1e-9);
  const below = marks.map((step) => drawing("text", { class: "tick", x: x(step), y: height - 8, "text-anchor": "middle", text: short(step) }));
  below.push(drawing("text", { class: "tick", x: 0, y: height - 8, text: "step" }));
  const lines = names.flatMap((name, at) => {
    const path = curves[name].map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const dots = curves[name].length <= 40 ? curves[name].map(([step, value]) => drawing("circle", { class: `dot c${at}`, cx: x(step), cy: y(value), r: curves[name].length === 1 ? 5 : 2.5 })) : [];
    return [drawing("polyline", { class: `curve c${at}`, points: path }), ...dots];
  });
  const cursor = drawing("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  const summary = names.map((name) => `${words(name)} ends at ${shown(curves[name].at(-1)[1])}`).join(", ");
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": `${title} by step: ${summary}` }, ...grid, ...below, ...lines, cursor);
  const values = names.map((name) => element("b"));
  const legend = names.map((name, at) => element("span", { class: "key" }, element("i", { class: `c${at}` }), `${words(name)} `, values[at]));
  const when = element("span", { class: "when" });
  follow(svg, cursor, points, x, (step) => {
    when.textContent = step === null ? "at the end" : `at step ${whole(Math.round(step))}`;
    names.forEach((name, at) => (values[at].textContent = shown(nearest(curves[name], step ?? Infinity)[1])));
  });
  return element("figure", { class: "chart" }, element("figcaption", {}, element("b", { text: title }), ...legend, when), svg);
}

function words(name) {
  return name.replaceAll("_", " ");
}

function nearest(curve, step) {
  return curve.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best), curve.at(-1));
}

// Call `show` with the step under the pointer or of the arrow keys, null where there is none.
function follow(svg, cursor, points, x, show) {
  const steps = [...new Set(points.map(([step]) => step))].sort((a, b) => a - b);
  let at = null;
  function go(place) {
    at = place;
    const step = place === null ? null : steps[place];
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const side of ["x1", "x2"]) cursor.setAttribute(side, x(step));
    show(step);
  }
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const where = ((event.clientX - frame.left) / frame.width) * CHART.width;
    go(steps.reduce((best, step, place) => (Math.abs(x(step) - where) < Math.abs(x(steps[best]) - where) ? place : best), 0));
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    go(Math.min(Math.max((at ?? steps.length) + move, 0), steps.length - 1));
  });
  for (const end of ["pointerleave", "blur"]) svg.addEventListener(end, () => go(null));
  go(null);
}
