// The rollouts browser: iterations as a strip, samples grouped by prompt, one response with its tokens coloured.
const VERDICTS = { correct: ["✓", "Correct"], wrong: ["✗", "Wrong"], unknown: ["?", "No verdict"], filler: ["·", "Filler row"] };
const COLUMNS = { rewards: "Process reward", returns: "Return", advantages: "Advantage" };
const view = { iteration: 0, row: 0, filter: "all", column: "rewards", scale: "iteration" };

const extreme = (rows, column) => { // 98th percentile of magnitudes: one wild token must not bleach all others
  const sizes = [];
  for (const row of rows) for (const v of row[column] || []) if (v !== null && v !== undefined) sizes.push(Math.abs(v));
  if (!sizes.length) return 0;
  sizes.sort((a, b) => a - b);
  return sizes[Math.floor((sizes.length - 1) * 0.98)] || sizes[sizes.length - 1];
};

function tint(element, value, most) { // blue above zero, orange below, the page's own ground at zero
  if (value === null || value === undefined) { element.classList.add("none"); return element; }
  if (value !== 0 && most > 0) {
    element.classList.add(value > 0 ? "pos" : "neg");
    element.style.setProperty("--a", (Math.min(1, Math.abs(value) / most) * 0.7).toFixed(3));
  }
  return element;
}

function visible(text) { // what has no shape of its own gets a faint sign; the line break still breaks
  const parts = [];
  const signs = { "\n": "↵\n", "\t": "→\t", "\r": "␍" };
  for (const piece of text.split(/([\n\t\r\u0000-\u001f\u007f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff])/)) {
    if (!piece) continue;
    const code = piece.codePointAt(0);
    const sign = signs[piece] || (piece.length === 1 && (code < 32 || code === 127) ? String.fromCodePoint(0x2400 + (code % 127 || 0))
      : piece.length === 1 && /[\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/.test(piece) ? `⟨U+${code.toString(16).toUpperCase()}⟩` : null);
    parts.push(sign ? h("span", { class: "ghost" }, sign) : piece);
  }
  return parts.length ? parts : [h("span", { class: "ghost" }, "∅")];
}

function drawStrip(iterations, choose) { // accuracy of every iteration; the chosen one in full ink
  const n = iterations.length, groups = [];
  const svg = s("svg", { viewBox: `0 0 ${n * 10} 64`, preserveAspectRatio: "none", "aria-hidden": "true", style: { "max-width": `${n * 30}px` } });
  iterations.forEach((it, i) => {
    const judged = it.counts.correct + it.counts.wrong, share = judged ? it.counts.correct / judged : 0;
    const group = s("g", { onclick: () => choose(i), onpointerleave: hideTip, onpointermove: (event) => showTip(event, h("b", {}, nameOf(it)),
      h("dl", {}, h("dt", {}, "correct"), h("dd", {}, judged ? `${(share * 100).toFixed(1)} %` : "–"), h("dt", {}, "rollouts"), h("dd", {}, count(it.total)))) },
      s("rect", { class: "hit", x: i * 10, y: 0, width: 10, height: 64 }),
      s("rect", { x: i * 10 + 1, y: 63 - share * 60, width: 8, height: share * 60 + 1 }));
    groups.push(group);
    svg.append(group);
  });
  const mark = () => groups.forEach((g, i) => g.lastChild.style.setProperty("fill", i === view.iteration ? "var(--accent)" : "var(--c6)"));
  return { element: h("div", { class: "strip" }, svg), mark };
}

const nameOf = (it) => `${it.phase === "eval" ? "Evaluation at step" : it.phase === "rl" ? "Iteration" : `${PHASE[it.phase] || it.phase} step`} ${it.step}`;

function stepsOf(row) { // tokens in runs of one step: [{step, from, to}]
  const runs = [];
  row.tokens.forEach((_, i) => {
    const step = row.steps[i];
    const last = runs[runs.length - 1];
    if (last && last.step === step) last.to = i + 1;
    else runs.push({ step, from: i, to: i + 1 });
  });
  return runs;
}

function scoreBar(value, most) {
  if (value === null || value === undefined) return null;
  const size = most > 0 ? Math.min(1, Math.abs(value) / most) * 50 : 0;
  return s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { x: value >= 0 ? 50 : 50 - size, y: 1, width: size, height: 8, style: { fill: `rgb(var(--${value >= 0 ? "pos" : "neg"}) / .75)` } }),
    s("rect", { x: 49.5, y: 0, width: 1, height: 10, style: { fill: "var(--muted)" } }));
}

function drawResponse(row, iteration, most) {
  const scores = row.scores || [], scoreMost = extreme(iteration.rows, "scores");
  const known = scores.filter((v) => v !== null);
  const lowest = known.length > 1 ? scores.indexOf(Math.min(...known)) : -1;
  const marked = new Set();
  return stepsOf(row).map(({ step, from, to }) => {
    const fresh = step >= 0 && !marked.has(step);
    marked.add(step);
    const tokens = row.tokens.slice(from, to).map((token, k) => {
      const i = from + k;
      const at = (column, digits) => (row[column] ? signed(row[column][i], digits) : null);
      const facts = [["reward", at("rewards", 4)], ["step", step >= 0 ? String(step + 1) : "–"], ["step score", row.scores && step >= 0 ? signed(scores[step], 4) : null],
        ["advantage", at("advantages", 4)], ["return", at("returns", 4)], ["token", `${i + 1} of ${row.tokens.length + row.cut}`]];
      return tint(h("span", { class: "tok", onpointerleave: hideTip, onpointermove: (event) => showTip(event, h("div", { class: "mono" }, JSON.stringify(token).slice(0, 120)),
        h("dl", {}, facts.filter((f) => f[1] !== null).map(([k2, v]) => [h("dt", {}, k2), h("dd", {}, v)]))) }, visible(token)), row[view.column] ? row[view.column][i] : null, most);
    });
    const truth = fresh && row.first_error === step;
    return h("div", { class: truth ? "step truth" : "step" },
      h("span", { class: "n" }, step >= 0 ? String(step + 1) : ""),
      h("div", {}, h("div", { class: "mono" }, tokens),
        truth && h("span", { class: "flag" }, "◆ first error (ground truth)"),
        fresh && step === lowest && h("span", { class: "flag lowest" }, "lowest step score")),
      h("div", { class: "score" }, fresh && scores[step] !== undefined ? [scoreBar(scores[step], scoreMost), h("span", {}, signed(scores[step]))] : ""));
  });
}

function drawDetail(panel, row, iteration) {
  if (!row) { fill(panel, h("p", { class: "note" }, "No rollout of this iteration has this outcome.")); return; }
  const column = row[view.column] ? view.column : Object.keys(COLUMNS).find((c) => row[c]) || "rewards";
  view.column = column;
  const most = extreme(view.scale === "iteration" ? iteration.rows : [row], column);
  const [mark, word] = VERDICTS[row.verdict];
  const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
  const truth = row.first_error === undefined ? null : row.first_error < 0 ? "none" : `step ${row.first_error + 1}`;
  const again = () => drawDetail(panel, row, iteration);
  fill(panel,
    h("div", { class: "what" },
      h("span", { class: `verdict ${row.verdict}` }, `${mark} ${word}`),
      row.answer !== "" && fact("Answer", row.answer),
      row.outcome !== undefined && fact("Outcome", short(row.outcome)),
      truth !== null && fact("True first error", truth),
      fact("Length", plural(row.tokens.length + row.cut, "token")),
      row.stop && fact("Stopped by", row.stop === "length" ? "length limit" : row.stop),
      row.row !== undefined && fact("Row", String(row.row))),
    h("div", { class: "ask mono" }, visible(row.prompt)),
    h("div", { class: "bar", style: { "margin-bottom": "14px", "align-items": "center" } },
      h("span", { class: "scale" }, h("span", {}, signed(-most, most < 0.1 ? 4 : 2)), h("span", { class: "ramp" }), h("span", {}, `${signed(most, most < 0.1 ? 4 : 2)}`)),
      h("span", { class: "tools" },
        choice("Colour by", Object.entries(COLUMNS).filter(([c]) => row[c]).map(([c, text]) => [c, text]), column, (c) => { view.column = c; again(); }),
        choice("Range of the colours", [["iteration", "Whole iteration"], ["response", "This response"]], view.scale, (v) => { view.scale = v; again(); }))),
    h("div", { class: "steps" }, drawResponse(row, iteration, most)),
    row.cut > 0 && h("p", { class: "note" }, `${plural(row.cut, "more token")} of this response ${row.cut === 1 ? "is" : "are"} left out.`));
  panel.scrollTop = 0;
}

function drawRollouts() {
  const { iterations, total, embedded } = DATA.rollouts;
  if (!embedded) return;
  const section = byId("rollouts");
  section.hidden = false;
  const list = h("div", { class: "list", "aria-label": "Rollouts" }), detail = h("div", { class: "detail" });
  const filters = h("span", {}), title = h("span", {}), about = h("span", { class: "note" });

  const drawList = () => {
    const it = iterations[view.iteration];
    const kept = it.rows.filter((row) => view.filter === "all" || row.verdict === view.filter);
    const most = extreme(it.rows, "scores");
    let prompt = null;
    const items = [], buttons = [];
    const select = (k, focus) => {
      buttons.forEach((b, j) => b.setAttribute("aria-current", String(j === k)));
      if (focus && buttons[k]) { buttons[k].focus({ preventScroll: false }); }
      drawDetail(detail, kept[k], it);
    };
    kept.forEach((row, k) => {
      if (row.prompt_id !== prompt || k === 0) {
        prompt = row.prompt_id;
        items.push(h("div", { class: "prompt" }, row.prompt.replace(/\s+/g, " ").slice(0, 160) || "(empty prompt)"));
      }
      const button = h("button", { type: "button", onclick: () => select(k),
        onkeydown: (event) => {
          const to = { ArrowDown: k + 1, ArrowUp: k - 1 }[event.key];
          if (to !== undefined && to >= 0 && to < kept.length) { event.preventDefault(); select(to, true); }
        } },
      h("span", { class: `mark ${row.verdict}` }, VERDICTS[row.verdict][0]),
      h("span", {}, VERDICTS[row.verdict][1], row.first_error >= 0 ? h("small", {}, ` from step ${row.first_error + 1}`) : ""),
      h("small", {}, `${row.tokens.length + row.cut} tok`),
      row.scores && row.scores.length > 0 && h("span", { class: "heat" }, row.scores.map((v) => tint(h("i", {}), v, most))));
      buttons.push(button);
      items.push(button);
    });
    fill(list, items);
    list.scrollTop = 0;
    select(0);
  };
  const choose = (i) => {
    view.iteration = Math.max(0, Math.min(iterations.length - 1, i));
    const it = iterations[view.iteration];
    strip.mark();
    const of = (name) => it.rows.filter((row) => row.verdict === name).length;
    const names = ["correct", "wrong", ...["unknown", "filler"].filter(of)];
    if (view.filter !== "all" && !of(view.filter)) view.filter = "all";
    fill(filters, choice("Outcome", [["all", `All ${it.rows.length}`], ...names.map((v) => [v, `${VERDICTS[v][1]} ${of(v)}`, of(v) > 0])],
      view.filter, (v) => { view.filter = v; drawList(); }));
    const judged = it.counts.correct + it.counts.wrong;
    fill(title, h("b", {}, nameOf(it)));
    fill(about, `${judged ? `${((100 * it.counts.correct) / judged).toFixed(1)} % correct of ${plural(judged, "rollout")}` : plural(it.total, "rollout")}`
      + (it.total > it.rows.length ? `, first ${count(it.rows.length)} here` : ""));
    picker.value = String(view.iteration);
    drawList();
  };
  const picker = h("input", { type: "range", min: 0, max: iterations.length - 1, step: 1, "aria-label": "Iteration", oninput: (e) => choose(Number(e.target.value)) });
  const strip = drawStrip(iterations, choose);
  const left = total - embedded;
  put(section,
    h("div", {}, h("h2", {}, "Rollouts"), h("p", { class: "note" }, "Share of correct rollouts per iteration; choose one to read its responses. Blue tokens were rewarded by the "
      + "process reward model, orange ones penalised. " + (left > 0 ? `${count(embedded)} of ${plural(total, "rollout")} are in this file, evenly over the iterations; ${count(left)} are left out.`
        : `All ${plural(total, "rollout")} of samples/ are in this file.`))),
    iterations.length > 1 && strip.element,
    h("div", { class: "bar", style: { "margin-top": "14px", "align-items": "center" } },
      h("span", { class: "tools" },
        iterations.length > 1 && h("span", { class: "choice" }, h("button", { type: "button", "aria-label": "Previous iteration", onclick: () => choose(view.iteration - 1) }, "←"),
          h("button", { type: "button", "aria-label": "Next iteration", onclick: () => choose(view.iteration + 1) }, "→")),
        iterations.length > 1 && picker, title, about),
      filters),
    h("div", { class: "browser" }, list, detail));
  choose(iterations.length - 1);
}
