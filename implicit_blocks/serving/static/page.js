/* The form, the requests to the server, and reports that are part of the document. */
let cards = [], stopping = null;
const isNarrow = matchMedia("(max-width: 60rem)");

const power = (id) => Number((10 ** Number($(id).value)).toPrecision(2));

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function showSettings() {
  const shown = {
    tolerance: power("tolerance"), other: power("other"), iterations: $("iterations").value, count: $("count").value,
    temperature: $("temperature").value === "0" ? "most likely token" : $("temperature").value,
  };
  for (const [id, value] of Object.entries(shown)) {
    document.querySelector(`output[for="${id}"]`).value = value;
    $(id).setAttribute("aria-valuetext", value);
  }
  $("other-label").hidden = $("compare").value !== "tolerance";
}

async function failure(response) {
  if (response.status === 401) $("key-label").hidden = false;
  try { return (await response.json()).error.message; } catch { return `the server answered ${response.status}`; }
}

async function loadModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await failure(response));
    cards = (await response.json()).data;
  } catch (error) { $("problem").textContent = error.message; return; }
  const [card, ...others] = cards;
  $("problem").textContent = "";
  task = card.word_problem ?? null;
  $("model").textContent = `${card.id}: ${card.kind} model` + (task ? ` of products in ${task.name}` : "");
  $("count").max = Math.min(task ? 128 : 1024, card.max_seq_len - 1);
  if (card.tolerance) {
    $("tolerance").value = Math.log10(card.tolerance);
    $("iterations").max = Math.max(8, Math.min(1000, 2 * card.max_iterations));
    $("iterations").value = card.max_iterations;
  }
  for (const id of ["tolerance", "iterations", "other"]) $(id).disabled = !card.accepts_limits;
  const choices = others.map((one) => [`model ${one.id}`, `${one.id}, ${one.kind} model`]);
  if (card.accepts_limits) choices.push(["tolerance", "another tolerance"]);
  $("compare").replaceChildren(...[["", "nothing"], ...choices].map(([value, textContent]) => made("option", { value, textContent })));
  $("compare").disabled = !choices.length;
  if (others.length) $("compare").value = choices[0][0];
  if (task) showTask();
  showSettings();
}

/* ------------------------------------------------------------------ word problems */

function showTask() {
  $("form-title").textContent = `Products in ${task.name}`;
  $("prompt-label").textContent = "Sequence, as token IDs";
  $("go").textContent = "Run the sequence";
  $("count-label").textContent = "Length of random sequences";
  $("palette").hidden = $("order-label").hidden = false;
  $("temperature-label").hidden = true;
  $("count").value = 16;
  const buttons = task.names.map((name, id) => {
    const button = made("button", { type: "button", tabIndex: id ? -1 : 0, attributes: { "aria-label": `append ${name}` } },
      permutation({ token_id: id, token: "" }));
    button.addEventListener("click", () => { append(id); });
    return button;
  });
  $("elements").replaceChildren(...buttons);
  $("elements").addEventListener("keydown", (event) => {
    const at = buttons.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = { Home: 0, End: buttons.length - 1 }[event.key] ?? at + step;
    if (at < 0 || !(next >= 0 && next < buttons.length)) return;
    event.preventDefault();
    buttons[at].tabIndex = -1;
    buttons[next].tabIndex = 0;
    buttons[next].focus();
  });
  if (!$("prompt").value && buttons.length) drawSequence();
}

const sequence = () => $("prompt").value.split(/\s+/).filter(Boolean);
function drawSequence() {
  const numbers = crypto.getRandomValues(new Uint32Array(Number($("count").value)));
  $("prompt").value = [...numbers].map((number) => number % task.names.length).join(" ");
}
function append(id) {
  $("prompt").value = [...sequence(), id].join(" ");
  run();
}

/* ------------------------------------------------------------------ requests */

function limits(card, tolerance) {
  return card.accepts_limits ? { tolerance, max_iterations: Number($("iterations").value) } : {};
}

/* Yield the events of a stream of the server. */
async function* events(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), signal, body: JSON.stringify({ ...body, stream: true }) });
  if (!response.ok) throw new Error(await failure(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/* Continue the prompt by one model. */
async function complete(answer, card, tolerance, prompt, signal) {
  const began = performance.now();
  const body = {
    model: card.id, prompt, max_tokens: Number($("count").value), seed: 1, temperature: Number($("temperature").value),
    logprobs: 5, return_iterations: true, stream_options: { include_usage: true }, ...limits(card, tolerance),
  };
  for await (const chunk of events("v1/completions", body, signal)) {
    if (chunk.usage) answer.summarize(chunk.usage, (performance.now() - began) / 1000);
    for (const choice of chunk.choices) choice.token_reports.forEach((report, place) => {
      const known = Object.entries(choice.logprobs?.top_logprobs?.[place] ?? {}).sort((a, b) => b[1] - a[1]);
      const alternatives = known.map(([token, log_probability]) => ({ token, token_id: null, log_probability }));
      answer.add({ ...report, generated: true, alternatives: task ? [] : alternatives });
    });
    paint();
  }
}

/* Repeat the searches of an answer for their curves and iterates. */
async function inspect(answer, card, tolerance, prompt, signal) {
  const continuation = answer.tokens.map((token) => token.token_id);
  answer.loading = true;
  answer.show();
  try {
    let number = 0;
    const body = { model: card.id, prompt, continuation, ...limits(card, tolerance) };
    for await (const report of events("v1/inspect", body, signal)) if (report.generated) answer.complete(number++, report);
  } catch (error) {
    if (error.name !== "AbortError") $("problem").textContent = error.message;
  }
  answer.loading = false;
  answer.show();
}

/* Run a word problem by one model: what it predicts at each token. */
async function solve(answer, card, tolerance, signal) {
  const began = performance.now(), tokens = sequence().map(Number), one = $("order").value === "one";
  if (!tokens.every((token) => Number.isInteger(token) && token >= 0)) throw new Error("the sequence is not token IDs such as 0 3 2; correct it");
  const parts = one ? { prompt: tokens.slice(0, 1), continuation: tokens.slice(1) } : { prompt: tokens };
  for await (const report of events("v1/inspect", { model: card.id, ...parts, ...limits(card, tolerance) }, signal)) {
    answer.add({ ...report, generated: false });
    answer.summarize(answer.usage());
    paint();
  }
  answer.summarize(answer.usage(), (performance.now() - began) / 1000);
}

/* The models and tolerances to run. */
function choices() {
  const [card, ...others] = cards, first = { card, tolerance: power("tolerance") };
  const compared = $("compare").value;
  if (compared === "tolerance") return [first, { card, tolerance: power("other") }];
  const other = others.find((one) => compared === `model ${one.id}`);
  return other ? [first, { card: other, tolerance: power("tolerance") }] : [first];
}
function titleOf({ card, tolerance }) {
  if (!card.accepts_limits) return cards.length > 1 ? card.id : "Continuation";
  return cards.length > 1 ? `${card.id}, tolerance ${tolerance}` : `Tolerance ${tolerance}`;
}

/* Show a message to everyone, or, as the summaries are visible already, to screen readers alone. */
function announce(message, { visible = true } = {}) {
  $("status").textContent = message;
  $("status").classList.toggle("sr", !visible);
}

async function run() {
  stopping?.abort();
  $("problem").textContent = "";
  if (!cards.length) await loadModels();
  if (!cards.length) return;
  const own = stopping = new AbortController(), prompt = $("prompt").value, chosen = choices();
  $("stop").disabled = false;
  $("go").disabled = true;
  $("results").setAttribute("aria-busy", "true");
  announce("Running…");
  answers = chosen.map((one) => new Answer(titleOf(one), { tolerance: one.card.accepts_limits ? one.tolerance : null }));
  $("answers").replaceChildren(...answers.map((answer) => answer.element));
  const mine = answers;
  if (isNarrow.matches) $("results").scrollIntoView({ block: "start" });
  try {
    await Promise.all(mine.map((answer, place) => task ? solve(answer, chosen[place].card, chosen[place].tolerance, own.signal)
      : complete(answer, chosen[place].card, chosen[place].tolerance, prompt, own.signal)));
    if (own !== stopping) return;
    announce(mine.map((answer) => `${answer.title}: ${answer.summary.textContent}`).join("; "), { visible: false });
  } catch (error) {
    if (own !== stopping) return;
    const stopped = error.name === "AbortError";
    announce(stopped ? "Stopped." : "");
    if (!stopped) { own.abort(); $("problem").textContent = error.message; }
  }
  $("go").disabled = false;
  $("stop").disabled = true;
  $("results").removeAttribute("aria-busy");
  if (task) return;
  const { signal } = stopping = new AbortController();
  mine.forEach((answer, place) => {
    const { card, tolerance } = chosen[place];
    const repeat = () => inspect(answer, card, tolerance, prompt, signal);
    if (!answer.tokens.length) return;
    if (answer.chosen >= 0) repeat(); else answer.inspect = repeat;
  });
}

/* ------------------------------------------------------------------ the document */

function showReport({ title, answers: given, word_problem }) {
  document.title = document.querySelector("h1").textContent = title;
  task = word_problem;
  for (const id of ["model", "form", "status"]) $(id).hidden = true;
  document.querySelector("main").classList.add("document");
  answers = given.map((one) => Object.assign(new Answer(one.label, { tolerance: one.tolerance }), { marksNew: true }));
  $("answers").append(...answers.map((answer) => answer.element));
  given.forEach((one, place) => {
    for (const token of one.tokens) answers[place].add(token);
    answers[place].summarize(answers[place].usage());
  });
  color();
}

if ($("report-data")) showReport(JSON.parse($("report-data").textContent));
else {
  $("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  $("stop").addEventListener("click", () => stopping?.abort());
  $("form").addEventListener("input", showSettings);
  $("key").addEventListener("change", loadModels);
  $("random").addEventListener("click", () => { drawSequence(); run(); });
  $("remove").addEventListener("click", () => {
    $("prompt").value = sequence().slice(0, -1).join(" ");
    if ($("prompt").value) run();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });
  $("settings").open = !isNarrow.matches;
  showSettings();
  loadModels();
}
