/* Charts of one search: residuals by iteration, and predictions of the iterates. */
const CHART = { width: 360, left: 38, right: 10, top: 12, height: 130 };

function frame(label, last, height) {
  const svg = drawn("svg", { viewBox: `0 0 ${CHART.width} ${height}`, role: "img", "aria-label": label });
  const span = CHART.width - CHART.left - CHART.right;
  const x = (call) => CHART.left + span * (last > 1 ? (call - 1) / (last - 1) : 0.5);
  return { svg, x };
}

function write(svg, text, x, y, anchor = "start", className = "axis") {
  const element = drawn("text", { x, y, "text-anchor": anchor, class: className });
  element.textContent = text;
  svg.append(element);
}

function ticks(svg, x, last, y) {
  const shown = last > 2 ? [1, Math.round((1 + last) / 2), last] : last === 2 ? [1, 2] : [1];
  for (const call of shown) write(svg, call, x(call), y, call === last && last > 1 ? "end" : call === 1 && last > 1 ? "start" : "middle");
}

function line(svg, points, className) {
  svg.append(drawn("polyline", { class: `curve ${className}`, points: points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" ") }));
  const [x, y] = points.at(-1);
  svg.append(drawn("circle", { class: `point ${className}`, cx: x.toFixed(1), cy: y.toFixed(1), r: 3.5 }));
}

/* The residual of every iteration, on a logarithmic scale. */
function residualChart(residuals, tolerance) {
  const known = residuals.filter((value) => value > 0);
  if (!known.length) return null;
  const all = tolerance > 0 ? [...known, tolerance] : known;
  const low = Math.floor(Math.log10(Math.min(...all))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...all)) - 1e-9));
  const bottom = CHART.top + CHART.height;
  const label = `Residual by iteration: ${scientific(residuals[0])} at first, ${scientific(residuals.at(-1))} after ${residuals.length}`;
  const { svg, x } = frame(label, residuals.length, bottom + 20);
  const y = (value) => CHART.top + CHART.height * (high - Math.log10(value)) / (high - low);
  const every = Math.ceil((high - low) / 5);
  for (let power = high; power >= low; power -= every) {
    svg.append(drawn("line", { class: "grid", x1: CHART.left, x2: CHART.width - CHART.right, y1: y(10 ** power), y2: y(10 ** power) }));
    write(svg, power === 0 ? "1" : `1e${power}`, CHART.left - 5, y(10 ** power) + 4, "end");
  }
  if (tolerance > 0) {
    svg.append(drawn("line", { class: "limit", x1: CHART.left, x2: CHART.width - CHART.right, y1: y(tolerance), y2: y(tolerance) }));
    write(svg, "tolerance", CHART.left + 4, y(tolerance) - 4, "start", "axis");
  }
  line(svg, residuals.flatMap((value, place) => value > 0 ? [[x(place + 1), y(value)]] : []), "");
  ticks(svg, x, residuals.length, bottom + 15);
  return made("figure", {}, made("figcaption", { textContent: "Residual by iteration" }), svg);
}

/* Runs of iterates with the same most likely token. */
function leaders(lens) {
  const runs = [];
  for (const one of lens) {
    const last = runs.at(-1);
    if (last?.token_id === one.token_id) Object.assign(last, { end: one.iterations, to: one.log_probability });
    else runs.push({ ...one, start: one.iterations, end: one.iterations, from: one.log_probability, to: one.log_probability });
  }
  return runs;
}
const span = (run) => run.start === run.end ? `${run.start}` : `${run.start}–${run.end}`;

/* The probability of each alternative by iteration, above the tokens that lead. */
function lensChart(report) {
  const { lens, alternatives } = report, last = lens.at(-1).iterations, runs = leaders(lens);
  const bottom = CHART.top + CHART.height, strip = bottom + 24;
  const label = "Most likely token by iteration: " + runs.map((run) => `${span(run)}: ${nameOf(run)}, ${percent(run.to)}`).join("; ");
  const { svg, x } = frame(label, last, strip + 22);
  const highest = Math.exp(Math.max(...lens.flatMap((one) => one.alternatives)));
  const top = [0.02, 0.1, 0.2, 0.5].find((share) => highest <= share) ?? 1;
  const y = (logProbability) => CHART.top + CHART.height * (1 - Math.exp(logProbability) / top);
  for (const share of [0, top / 2, top]) {
    const at = CHART.top + CHART.height * (1 - share / top);
    svg.append(drawn("line", { class: "grid", x1: CHART.left, x2: CHART.width - CHART.right, y1: at, y2: at }));
    write(svg, `${100 * share} %`, CHART.left - 5, at + 4, "end");
  }
  alternatives.forEach((_, place) => line(svg, lens.map((one) => [x(one.iterations), y(one.alternatives[place])]), `s${place}`));
  ticks(svg, x, last, bottom + 15);
  const width = (CHART.width - CHART.left - CHART.right) / last;
  for (const [number, run] of runs.entries()) {
    const until = (runs[number + 1]?.start ?? last + 1) - 1;
    const place = alternatives.findIndex((one) => one.token_id === run.token_id);
    const left = CHART.left + width * (run.start - 1), wide = width * (until - run.start + 1);
    svg.append(drawn("rect", { class: `segment s${place < 0 ? 7 : place}`, x: left + 0.5, y: strip, width: Math.max(1, wide - 1), height: 18, rx: 3 }));
    const most = Math.floor((wide - 8) / 7), name = nameOf(run).trim();
    if (most >= Math.min(2, name.length)) write(svg, name.length > most ? `${name.slice(0, most - 1)}…` : name, left + wide / 2, strip + 13, "middle", "inside");
  }
  return made("figure", {}, made("figcaption", { textContent: "Prediction of each iterate (logit lens)" }), svg);
}

/* The alternatives of an output, the most likely first, with the iterations at which they led before. */
function alternativesList(report) {
  const runs = leaders(report.lens ?? []), first = report.alternatives[0]?.token_id;
  const items = report.alternatives.flatMap((one, place) => {
    const bar = made("span");
    bar.style.width = `${100 * Math.exp(one.log_probability)}%`;
    const led = runs.filter((run) => run.token_id === one.token_id && one.token_id !== first).map(span);
    if (place > 2 && one.log_probability < -7 && !led.length) return []; // too small to be seen
    const name = isDrawn() ? permutation(one) : made("span", { className: "name", textContent: nameOf(one) });
    const what = made("span", { className: "what" }, made("span", { className: "swatch" }), name);
    const item = made("li", { className: `s${place}` }, what, made("span", { className: "track" }, bar),
      made("span", { className: "share", textContent: percent(one.log_probability) }));
    if (led.length) item.append(made("span", { className: "note", textContent: `dropped: it led at iteration ${led.join(", ")}` }));
    return [item];
  });
  return made("figure", {}, made("figcaption", { textContent: "Alternatives at the output" }), made("ol", { className: "alternatives" }, ...items));
}

/* Every iterate as a table, for readers of the charts' numbers. */
function iteratesTable(report, open) {
  const rows = report.lens.map((one) => made("tr", {},
    ...[one.iterations, scientific(report.curve[one.iterations - 1]), nameOf(one), percent(one.log_probability)].map(
      (text) => made("td", { textContent: text }))));
  return scrolled("Every iterate", ["Iterations", "Residual", "Prediction", "Probability"], rows, "Iterates of the search", open);
}

function scrolled(title, heads, rows, label, open = false) {
  const head = made("tr", {}, ...heads.map((text) => made("th", { scope: "col", textContent: text })));
  const body = made("tbody", {}, ...rows);
  const region = made("div", { className: "scroll", tabIndex: 0, attributes: { role: "region", "aria-label": label } },
    made("table", {}, made("thead", {}, head), body));
  return made("details", { open }, made("summary", { textContent: title }), region);
}
