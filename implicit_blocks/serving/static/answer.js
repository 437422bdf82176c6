/* One answer: its tokens, the report of the chosen token, and a table of all. */
let answers = [];

class Answer {
  /* `inspect` is called once, when a token is chosen whose report is not complete. */
  constructor(title, { tolerance = null, inspect = null } = {}) {
    Object.assign(this, { title, tolerance, inspect, tokens: [], chosen: -1, right: 0 });
    const label = `${title}: tokens`;
    this.list = made("div", { className: isDrawn() ? "tokens cards" : "tokens", tabIndex: 0,
      attributes: { role: "listbox", "aria-label": label, "aria-orientation": "horizontal" } });
    this.summary = made("p", { className: "quiet summary" });
    this.facts = made("p", { className: "facts", attributes: { "aria-live": "polite" } });
    this.charts = made("div", { className: "charts" });
    this.heading = made("h3");
    this.report = made("div", { className: "report", hidden: true }, this.heading, this.facts, this.charts);
    const heads = task ? ["#", "Token", "Product so far", "Prediction", "Iterations", "Residual"]
      : ["#", "Token", "Iterations", "Residual", "Converged"];
    this.table = scrolled("Table of tokens", heads, [], `${title}: table of tokens`);
    this.table.open = Boolean(task);
    this.rows = this.table.querySelector("tbody");
    this.element = made("section", { className: "answer", attributes: { "aria-label": title } },
      made("div", { className: "title" }, made("h2", { textContent: title }), this.summary), this.list, this.report, this.table);
    this.list.addEventListener("keydown", (event) => this.move(event));
    this.list.addEventListener("focus", () => { if (this.chosen < 0) choose(this, 0); });
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const end = { Home: 0, End: this.tokens.length - 1 }[event.key];
    if (step === undefined && end === undefined) return;
    event.preventDefault();
    choose(this, end ?? Math.min(this.tokens.length - 1, Math.max(0, this.chosen + step)));
  }

  add(token) {
    const number = this.tokens.length;
    const name = nameOf(token);
    const element = made("span", { className: "token", id: `a${answers.indexOf(this)}-${number}`,
      attributes: { role: "option", "aria-selected": "false" } });
    token.element = element;
    this.tokens.push(token);
    if (token.product && isDrawn()) this.draw(token, number); else element.textContent = name;
    const right = token.right === undefined ? "" : token.right ? ", right" : ", wrong";
    const count = token.iterations === null ? "" : `, ${token.iterations} iterations`;
    element.setAttribute("aria-label", `${name}${right}${count}`);
    if (token.generated && this.marksNew) element.classList.add("new");
    if (token.converged === false) element.classList.add("open");
    element.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") choose(this, number); });
    element.addEventListener("click", () => choose(this, number));
    this.list.append(element);
    token.row = this.row(token, number);
    this.rows.append(token.row);
    if (token.right) this.right += 1;
  }

  /* A card of a word problem: the balls before and after the token, and whether the model knows where they are. */
  draw(token, number) {
    const image = task.permutations[token.token_id];
    const before = number ? task.permutations[this.tokens[number - 1].product.token_id] : image.map((_, place) => place);
    const step = image.length > 6 ? 13 : 18, radius = image.length > 6 ? 5 : 7;
    token.element.append(strands(before, image, { step, radius, ends: number === 0 }),
      made("span", { textContent: nameOf(token) }), this.mark(token));
  }

  mark({ right }) {
    return made("span", { className: `mark ${right ? "right" : "wrong"}`, textContent: right ? "✓" : "✗",
      attributes: { role: "img", "aria-label": right ? "right" : "wrong" } });
  }

  row(token, number) {
    const cells = [made("th", { scope: "row", textContent: number + 1 })];
    const cell = (...content) => cells.push(made("td", {}, ...content));
    cell(task ? permutation(token) : nameOf(token));
    if (task) {
      cell(token.product ? permutation(token.product) : "–");
      cell(...(token.prediction ? [this.mark(token), permutation(token.prediction)] : ["–"]));
    }
    cell(`${token.iterations ?? "–"}`);
    cell(scientific(token.residual));
    if (!task) cell(token.converged === null ? "–" : token.converged ? "yes" : "no");
    return made("tr", {}, ...cells);
  }

  choose(number) {
    if (number < 0 || number >= this.tokens.length) return;
    const before = this.tokens[this.chosen], token = this.tokens[this.chosen = number];
    for (const [one, on] of [[before, false], [token, true]]) {
      one?.element.classList.toggle("chosen", on);
      one?.row.classList.toggle("chosen", on);
      one?.element.setAttribute("aria-selected", `${on}`);
    }
    this.list.setAttribute("aria-activedescendant", token.element.id);
    this.show();
    if (this.inspect && !token.lens) {
      const inspect = this.inspect;
      this.inspect = null;
      inspect(this);
    }
  }

  /* Show the report of the chosen token, as far as it is known. */
  show() {
    const token = this.tokens[this.chosen];
    if (!token) return;
    this.report.hidden = false;
    this.heading.replaceChildren(`Token ${this.chosen + 1}: `, made("span", { className: "name", textContent: nameOf(token) }));
    const facts = [token.iterations === null ? "no search" : `${token.iterations} iterations`];
    if (token.residual !== null && token.residual !== undefined) facts.push(`residual ${scientific(token.residual)}`);
    if (token.converged !== null) facts.push(token.converged ? "converged" : "did not converge");
    if (token.product) facts.push(token.right ? `right: ${nameOf(token.product)}` : `wrong: ${nameOf(token.prediction)} instead of ${nameOf(token.product)}`);
    this.facts.textContent = facts.join(" · ");
    const parts = [], open = this.charts.querySelector("details")?.open ?? false;
    if (token.curve?.length) parts.push(residualChart(token.curve, this.tolerance));
    if (token.lens?.length) parts.push(lensChart(token));
    if (token.alternatives?.length) parts.push(alternativesList(token));
    if (token.lens?.length) parts.push(iteratesTable(token, open));
    if (this.loading && !token.lens) parts.push(made("p", { className: "quiet", textContent: "Repeating the search for its curve…" }));
    this.charts.replaceChildren(...parts.filter(Boolean));
  }

  /* Complete a token by the report of its search. */
  complete(number, report) {
    const token = this.tokens[number];
    if (!token) return;
    token.curve = report.curve;
    token.lens = report.lens;
    token.alternatives = report.alternatives;
    if (number === this.chosen) this.show();
  }

  summarize(usage, seconds) {
    const count = usage.completion_tokens, parts = [`${count} tokens`];
    if (task && this.tokens.length) parts.push(`${this.right} of ${this.tokens.length} right`);
    if (usage.iterations !== undefined && count) parts.push(`${(usage.iterations / count).toFixed(1)} iterations each`);
    if (usage.unconverged_tokens) parts.push(`${usage.unconverged_tokens} did not converge`);
    if (seconds !== undefined) parts.push(`${seconds.toFixed(1)} s`);
    this.summary.textContent = parts.join(" · ");
  }

  /* The usage of the tokens so far, as the API counts it. */
  usage() {
    const searched = this.tokens.filter((token) => token.iterations !== null);
    const iterations = searched.reduce((sum, token) => sum + token.iterations, 0);
    return { completion_tokens: this.tokens.length, ...(searched.length ? { iterations } : {}),
      unconverged_tokens: searched.filter((token) => !token.converged).length };
  }
}

/* Choose a token in one answer, and the token beside it in the others. */
function choose(answer, number) {
  for (const one of answers) if (one === answer || number < one.tokens.length) one.choose(number);
}

let painting = false;
function paint() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => { painting = false; color(); });
}

/* Color all tokens on one scale, from the fewest to the most iterations. */
function color() {
  const counts = answers.flatMap((answer) => answer.tokens.map((token) => token.iterations)).filter((n) => n !== null);
  $("scale").hidden = !counts.length;
  if (!counts.length) return;
  const fewest = counts.reduce((a, b) => Math.min(a, b)), most = counts.reduce((a, b) => Math.max(a, b));
  $("fewest").textContent = `${fewest} iterations`;
  $("most").textContent = `${most}`;
  for (const answer of answers) for (const token of answer.tokens) {
    if (token.iterations === null) continue;
    const share = most === fewest ? 0 : Math.round(100 * (token.iterations - fewest) / (most - fewest));
    if (token.share !== share) token.element.style.backgroundColor = `color-mix(in oklab, var(--low), var(--high) ${token.share = share}%)`;
  }
}
