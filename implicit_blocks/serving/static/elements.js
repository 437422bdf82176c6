/* Elements, texts of tokens, and pictures of permutations. Texts of a model become text nodes only. */
const $ = (id) => document.getElementById(id);

function made(name, properties = {}, ...children) {
  const { attributes = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(name), rest);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";
function drawn(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/* The text of a token, with names for bytes and control characters. */
function shownToken(name) {
  if (name.startsWith("bytes:\\x")) return `‹${name.slice(8)}›`;
  return name.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) => `‹${c.charCodeAt(0).toString(16).padStart(2, "0")}›`);
}

const percent = (logProbability) => {
  const value = 100 * Math.exp(logProbability);
  return value > 0 && value < 0.05 ? "< 0.1 %" : `${value.toFixed(1)} %`;
};
const scientific = (value) => value === null || value === undefined ? "–" : Number(value).toExponential(1);

/* The task of the models: the elements that token IDs stand for. Null: the models continue texts. */
let task = null;
const isDrawn = () => Boolean(task?.permutations.length);
const compose = (left, right) => right.map((place) => left[place]);

/* The name of a token: that of its element, or its text. */
function nameOf(token) {
  return task?.names.length ? task.names[token.token_id] : shownToken(token.token);
}

function ball(value, x, y, radius) {
  const circle = drawn("circle", { cx: x, cy: y, r: radius });
  const number = drawn("text", { x, y, "font-size": radius * 1.4 });
  number.style.fontSize = `${radius * 1.4}px`;
  number.textContent = value + 1;
  return drawn("g", { class: `ball s${value % 12}` }, circle, number);
}

/* Balls from an arrangement (left) to the one after a permutation (right): place i receives the ball of p[i]. */
function strands(before, permutation, { width = 58, step = 18, radius = 7, label, ends = true }) {
  const height = step * permutation.length + 4, after = compose(before, permutation);
  const y = (place) => 2 + step * (place + 0.5), inset = ends ? radius + 1 : 0, middle = width / 2;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "picture" });
  if (label) svg.setAttribute("aria-label", label); else svg.setAttribute("aria-hidden", "true");
  permutation.forEach((from, place) => svg.append(drawn("path", {
    class: `strand s${after[place] % 12}`,
    d: `M${inset},${y(from)} C${middle},${y(from)} ${middle},${y(place)} ${width - inset},${y(place)}`,
  })));
  after.forEach((value, place) => svg.append(ball(value, width - radius - 1, y(place), radius)));
  if (ends) before.forEach((value, place) => svg.append(ball(value, radius + 1, y(place), radius)));
  return svg;
}

/* A permutation as a small picture with its name beside it. */
function permutation(token) {
  const name = made("span", { textContent: nameOf(token) });
  if (!isDrawn()) return name;
  const image = task.permutations[token.token_id];
  const picture = strands(image.map((_, place) => place), image, { width: 46, step: 13, radius: 5.5 });
  return made("span", { className: "permutation" }, picture, name);
}
