// Learning curves and phase times. One step axis for a group of panels: every phase gets a piece of it, so that 900 quick
// SFT steps do not squeeze 80 RL iterations into the last pixels; the pieces are shaded and named.
const PLOT = { height: 168, left: 44, right: 8, top: 10, bottom: 36 };
const LEAST_SHARE = 0.2; // of the width, for the shortest phase
const curves = { smooth: 0.6, log: false, hover: null, panels: [] };

function segments(keys) { // the phases in which a group has data, as pieces [start, end, share] that touch
  let first = Infinity, last = -Infinity;
  for (const key of keys) {
    const { x, y } = DATA.series[key];
    for (let i = 0; i < x.length; i++) if (y[i] !== null) { first = Math.min(first, x[i]); last = Math.max(last, x[i]); }
  }
  if (first === last) { first -= 1; last += 1; }
  const pieces = [];
  for (const phase of DATA.phases) {
    const from = Math.max(first, pieces.length ? pieces[pieces.length - 1].end : phase.start);
    const to = Math.min(last, phase.end);
    if (to > from) pieces.push({ name: phase.name, start: pieces.length ? from : Math.max(first, phase.start), end: to });
  }
  if (!pieces.length) pieces.push({ name: null, start: first, end: last });
  pieces[0].start = Math.min(pieces[0].start, first);
  pieces[pieces.length - 1].end = Math.max(pieces[pieces.length - 1].end, last);
  const whole = pieces.reduce((sum, p) => sum + p.end - p.start, 0);
  for (const p of pieces) p.share = Math.max(LEAST_SHARE, (p.end - p.start) / whole);
  const shares = pieces.reduce((sum, p) => sum + p.share, 0);
  for (const p of pieces) p.share /= shares;
  return pieces;
}

function stepAxis(pieces, left, width) {
  let at = left;
  const placed = pieces.map((p) => { const piece = { ...p, x: at, w: p.share * width }; at += piece.w; return piece; });
  const to = (v) => {
    const p = placed.find((q) => v <= q.end) || placed[placed.length - 1];
    return p.x + ((v - p.start) / (p.end - p.start)) * p.w;
  };
  const from = (px) => {
    const p = placed.find((q) => px <= q.x + q.w) || placed[placed.length - 1];
    return p.start + ((px - p.x) / p.w) * (p.end - p.start);
  };
  return { placed, to, from, first: placed[0].start, last: placed[placed.length - 1].end };
}

function smoothed(y, weight) { // exponential mean with the start-up bias taken out; a gap stays a gap
  let mean = 0, mass = 0;
  return y.map((v) => {
    if (v === null) return null;
    mean = weight * mean + (1 - weight) * v;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function pathOf(x, y, toX, toY) {
  let path = "", pen = false, lone = "";
  for (let i = 0; i < x.length; i++) {
    if (y[i] === null) { pen = false; continue; }
    const point = `${toX(x[i]).toFixed(1)} ${toY(y[i]).toFixed(1)}`;
    const alone = !pen && (i + 1 >= x.length || y[i + 1] === null);
    path += `${pen ? "L" : "M"}${point}`;
    if (alone) lone += `M${point}h.01`; // a point between two gaps would be invisible
    pen = true;
  }
  return path + lone;
}

function valueAxis(panel, lines, height) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) for (const v of line.y) if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
  const log = curves.log && low > 0;
  if (panel.reference && !log) { low = Math.min(low, panel.reference[0]); high = Math.max(high, panel.reference[0]); }
  if (log) { low = Math.log10(low); high = Math.log10(high); }
  if (high - low < 1e-12) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
  const pad = (high - low) * 0.06;
  const floor = !log && low >= 0 && low - pad < 0 ? 0 : low - pad;
  high += pad;
  low = floor;
  const y = (v) => PLOT.top + (1 - ((log ? Math.log10(v) : v) - low) / (high - low)) * height;
  let { ticks, size } = niceTicks(low, high, 3);
  if (ticks.length < 3) ({ ticks, size } = niceTicks(low, high, 5));
  if (log) {
    const all = [];
    for (let e = Math.floor(low); e <= high; e++) for (const m of high - low > 1.5 ? [1] : [1, 2, 5]) all.push(m * 10 ** e);
    ticks = all.filter((v) => Math.log10(v) >= low && Math.log10(v) <= high);
    if (ticks.length < 2) ticks = niceTicks(10 ** low, 10 ** high, 3).ticks.filter((v) => v > 0);
  }
  const digits = Math.max(0, -Math.floor(Math.log10(size) + 1e-9));
  const text = (v) => Math.abs(v) < size * 1e-6 ? "0" : ((Math.abs(v) >= 1e5 || digits > 4 || log) ? minus(Number(v.toPrecision(3)).toString()) : minus(v.toFixed(digits)));
  return { y, ticks, text };
}

function frame(axis, bottom, evals, resumed) { // phases, step ticks, evaluations, resumes: what every panel of a group shares
  const parts = [];
  let lastLabel = -Infinity;
  axis.placed.forEach((p, i) => {
    parts.push(s("rect", { x: p.x, y: PLOT.top, width: p.w, height: bottom - PLOT.top, style: { fill: i % 2 ? "var(--band2)" : "var(--band)" } }));
    if (i) parts.push(s("line", { x1: p.x, x2: p.x, y1: PLOT.top, y2: bottom + 4, class: "edge" }));
    for (const t of niceTicks(p.start, p.end, Math.max(1, p.w / 62)).ticks) {
      if (!Number.isInteger(t) || t < p.start || t > p.end) continue;
      const x = axis.to(t), half = count(t).length * 3.1;
      if (x - half < lastLabel + 7 || (i + 1 < axis.placed.length && x > p.x + p.w - 4)) continue;
      lastLabel = x + half;
      parts.push(s("line", { x1: x, x2: x, y1: bottom, y2: bottom + 3, class: "edge" }),
        s("text", { x, y: bottom + 14, "text-anchor": "middle" }, count(t)));
    }
    if (p.name) parts.push(s("text", { x: p.x + p.w / 2, y: bottom + 29, "text-anchor": "middle", class: "phase" }, PHASE[p.name]));
  });
  for (const step of resumed) if (step > axis.first && step < axis.last) {
    parts.push(s("line", { x1: axis.to(step), x2: axis.to(step), y1: PLOT.top, y2: bottom, class: "resume" }));
  }
  for (const step of evals) if (step >= axis.first && step <= axis.last) {
    const x = axis.to(step);
    parts.push(s("path", { d: `M${x} ${bottom - 5}l3.2 5h-6.4z`, style: { fill: "var(--c1)", opacity: 0.85 } }));
  }
  return parts;
}

function drawPanel(panel) {
  const width = panel.plot.clientWidth;
  if (!width) return;
  const bottom = PLOT.height - PLOT.bottom;
  const axis = stepAxis(panel.pieces, PLOT.left, width - PLOT.left - PLOT.right);
  const lines = panel.keys.map((key, i) => ({ key, colour: COLOURS[i % COLOURS.length], isEval: key.startsWith("eval/"), ...DATA.series[key] }));
  const value = valueAxis(panel, lines, bottom - PLOT.top);
  const svg = s("svg", { viewBox: `0 0 ${width} ${PLOT.height}`, height: PLOT.height, role: "img", "aria-label": `${panel.title} by step` });
  svg.append(...frame(axis, bottom, DATA.evals, DATA.resumed));
  for (const t of value.ticks) {
    svg.append(s("line", { x1: PLOT.left, x2: width - PLOT.right, y1: value.y(t), y2: value.y(t), class: "rule" }),
      s("text", { x: PLOT.left - 7, y: value.y(t) + 3.6, "text-anchor": "end" }, value.text(t)));
  }
  for (const line of lines) {
    const dense = !line.isEval && line.x.length > 8;
    line.shown = dense && curves.smooth > 0 ? smoothed(line.y, curves.smooth) : line.y;
    if (line.shown !== line.y) svg.append(s("path", { d: pathOf(line.x, line.y, axis.to, value.y), class: "raw", style: { stroke: line.colour } }));
    svg.append(s("path", { d: pathOf(line.x, line.shown, axis.to, value.y), class: "curve", "stroke-linecap": "round",
      style: { stroke: line.colour, ...(line.isEval ? { "stroke-width": 1.1, "stroke-dasharray": "1 3.5" } : {}) } }));
    if (!dense) line.x.forEach((x, i) => line.y[i] !== null && svg.append(s("circle", { cx: axis.to(x), cy: value.y(line.y[i]), r: 3.1,
      style: line.isEval ? { fill: "var(--paper)", stroke: line.colour, "stroke-width": 1.7 } : { fill: line.colour } })));
  }
  if (panel.reference && !curves.log) {
    const y = value.y(panel.reference[0]);
    svg.append(s("line", { x1: PLOT.left, x2: width - PLOT.right, y1: y, y2: y, class: "ref" }),
      s("text", { x: width - PLOT.right - 3, y: y - 4, "text-anchor": "end", class: "halo" }, panel.reference[1]));
  }
  panel.cross = s("g", {});
  svg.append(panel.cross);
  panel.plot.replaceChildren(svg);
  Object.assign(panel, { lines, axis, value, bottom });
  readPanel(panel);
}

function nearest(line, step) {
  let low = 0, high = line.x.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (line.x[mid] < step) low = mid + 1; else high = mid; }
  if (low > 0 && step - line.x[low - 1] < line.x[low] - step) low -= 1;
  return low;
}

function readPanel(panel) { // the numbers beside the title: at the pointer, else the last ones
  if (!panel.lines) return;
  const inside = curves.hover !== null && curves.hover >= panel.axis.first && curves.hover <= panel.axis.last;
  panel.cross.replaceChildren();
  const reads = panel.lines.map((line) => {
    let i = line.y.length - 1;
    if (inside) i = nearest(line, curves.hover);
    else while (i > 0 && line.y[i] === null) i -= 1;
    if (inside && line.y[i] !== null) {
      panel.cross.append(s("circle", { cx: panel.axis.to(line.x[i]), cy: panel.value.y(line.shown[i]), r: 3.4, style: { fill: line.colour } }));
    }
    const name = panel.lines.length > 1 ? `${line.key.replace(/^critic\/score\/mean$/, "train").replace(/^.*?\//, line.isEval ? "eval " : "").replace(/_/g, " ")} ` : "";
    return h("span", {}, panel.lines.length > 1 && h("i", { style: { background: line.colour } }), name, h("b", {}, short(line.y[i])));
  });
  if (inside) {
    const x = panel.axis.to(curves.hover);
    panel.cross.prepend(s("line", { x1: x, x2: x, y1: PLOT.top, y2: panel.bottom, class: "cross" }));
    reads.unshift(h("span", {}, `step ${count(Math.round(curves.hover))}`));
  }
  fill(panel.read, reads);
}

function hoverAt(panel, event) {
  const x = event.clientX - panel.plot.getBoundingClientRect().left;
  curves.hover = Math.max(panel.axis.first, Math.min(panel.axis.last, panel.axis.from(Math.max(PLOT.left, x))));
  curves.panels.forEach(readPanel);
}

function drawCurves() {
  if (!DATA.groups.length) return;
  const section = byId("curves");
  section.hidden = false;
  const redraw = () => curves.panels.forEach(drawPanel);
  const value = h("output", {}, curves.smooth.toFixed(2));
  put(section, h("div", { class: "bar" },
    h("div", {}, h("h2", {}, "Learning curves"), h("p", { class: "note" }, "Each phase has its own stretch of the step axis. Numbers are the last recorded values, "
      + "or those under the pointer (unsmoothed).")),
    h("div", { class: "tools" },
      DATA.evals.length > 0 && h("span", { class: "key" }, s("svg", {}, s("path", { d: "M7 2l4.5 8h-9z", style: { fill: "var(--c1)" } })), "evaluation"),
      DATA.resumed.length > 0 && h("span", { class: "key" }, s("svg", {}, s("line", { x1: 7, x2: 7, y1: 0, y2: 12, class: "resume" })), "resumed"),
      h("label", {}, "Smooth", h("input", { type: "range", min: 0, max: 0.97, step: 0.01, value: curves.smooth,
        oninput: (e) => { curves.smooth = Number(e.target.value); value.textContent = curves.smooth.toFixed(2); redraw(); } }), value),
      h("label", {}, h("input", { type: "checkbox", onchange: (e) => { curves.log = e.target.checked; redraw(); } }), "Log scale"))));
  for (const group of DATA.groups) {
    const pieces = segments(group.panels.flatMap((p) => p.keys));
    const grid = h("div", { class: "grid" });
    for (const spec of group.panels) {
      const panel = { ...spec, pieces, plot: h("div", { class: "plot" }), read: h("span", { class: "read" }) };
      panel.plot.addEventListener("pointermove", (event) => hoverAt(panel, event));
      panel.plot.addEventListener("pointerleave", () => { curves.hover = null; curves.panels.forEach(readPanel); });
      grid.append(h("figure", {}, h("figcaption", {}, h("span", { class: "name" }, spec.title), panel.read), panel.plot));
      curves.panels.push(panel);
    }
    put(section, h("h3", {}, group.title), grid);
  }
  if (DATA.flat.length) put(section, h("p", { class: "note" }, "Not drawn, as nothing moved or there are two evaluations at most: " + DATA.flat.join(", ") + "."));
  redraw();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
}

// Phase times: totals as a table, every iteration as a stacked bar.

function partColours(parts) {
  const named = { gen: "var(--c0)", verify: "var(--c4)", step: "var(--c3)", other: "var(--c6)" };
  const spare = ["var(--c2)", "var(--c1)", "var(--c5)"];
  return parts.map((p) => named[p] || spare.shift() || "var(--c6)");
}

function drawBars(times, plot) {
  const width = plot.clientWidth, height = 232, bottom = height - 30, left = 52;
  if (!width) return;
  const colours = partColours(times.parts);
  const sums = times.bars.map((bar) => bar.slice(2).reduce((a, b) => a + (b || 0), 0));
  const sorted = [...sums].sort((a, b) => a - b), typical = sorted[Math.floor(sorted.length * 0.9)];
  const most = sorted[sorted.length - 1] > 2.2 * typical ? typical * 1.5 : sorted[sorted.length - 1] || 1; // compilation would flatten the rest
  const y = (v) => bottom - (Math.min(v, most * 1.04) / (most * 1.04)) * (bottom - 16);
  const slot = (width - left - 4) / times.bars.length;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Seconds per iteration, stacked by phase" });
  const { ticks, size } = niceTicks(0, most, 4);
  const digits = Math.max(0, -Math.floor(Math.log10(size) + 1e-9));
  for (const t of ticks) svg.append(s("line", { x1: left, x2: width, y1: y(t), y2: y(t), class: "rule" }),
    s("text", { x: left - 8, y: y(t) + 3.6, "text-anchor": "end" }, `${t.toFixed(digits)} s`));
  let lastLabel = -Infinity;
  times.bars.forEach((bar, i) => {
    const x = left + i * slot, w = Math.max(0.6, Math.min(28, slot - (slot > 4 ? 1.5 : 0.3))), px = x + (slot - w) / 2;
    let base = 0;
    const group = s("g", {
      onpointermove: (event) => showTip(event, h("b", {}, bar[0] === bar[1] ? `Iteration ${count(bar[0])}` : `Iterations ${count(bar[0])} to ${count(bar[1])}, mean`),
        h("dl", {}, times.parts.map((p, k) => [h("dt", {}, p), h("dd", {}, seconds(bar[k + 2]))]), h("dt", {}, "total"), h("dd", {}, seconds(sums[i])))),
      onpointerleave: hideTip,
    });
    times.parts.forEach((part, k) => {
      const top = y(base + bar[k + 2]), foot = y(base);
      if (foot > top) group.append(s("rect", { x: px, y: top, width: w, height: foot - top, class: "part", style: { fill: colours[k] } }));
      base += bar[k + 2];
    });
    if (sums[i] > most * 1.04) {
      group.append(s("path", { d: `M${px - 1} 22l${w + 2} -4v3l${-(w + 2)} 4z`, style: { fill: "var(--paper)" } }));
      if (x - lastLabel > 50) { svg.append(s("text", { x: px, y: 10 }, `${seconds(sums[i])} ↑`)); lastLabel = x; }
    }
    group.append(s("rect", { x, y: 0, width: slot, height: bottom, style: { fill: "transparent" } }));
    svg.append(group);
  });
  const first = times.bars[0][0], last = times.bars[times.bars.length - 1][1];
  let end = -Infinity;
  for (const t of niceTicks(first, last + 1e-6, Math.max(1, width / 90)).ticks) {
    const i = times.bars.findIndex((bar) => bar[1] >= t);
    const x = left + (i + 0.5) * slot;
    if (i < 0 || !Number.isInteger(t) || x < end) continue;
    end = x + 40;
    svg.append(s("text", { x, y: bottom + 15, "text-anchor": "middle" }, count(t)));
  }
  plot.replaceChildren(svg);
}

function drawTimes() {
  if (!DATA.times.length) return;
  const section = byId("times");
  section.hidden = false;
  let chosen = DATA.times[DATA.times.length - 1].phase;
  const body = h("div", { class: "times" });
  const draw = () => {
    const times = DATA.times.find((t) => t.phase === chosen), colours = partColours(times.parts);
    const whole = times.totals.reduce((a, b) => a + b, 0) || 1;
    const plot = h("div", { class: "plot" });
    fill(body,
      h("div", {},
        h("div", { class: "stack" }, times.parts.map((p, k) => h("i", { title: p, style: { background: colours[k], flex: `${times.totals[k] / whole} 0 0` } }))),
        h("table", {},
          h("thead", {}, h("tr", {}, ["Phase of an iteration", "Total", "Share", "Mean"].map((t) => h("th", {}, t)))),
          h("tbody", {},
            times.parts.map((p, k) => h("tr", {}, h("td", {}, h("i", { style: { background: colours[k] } }), p), h("td", {}, seconds(times.totals[k])),
              h("td", {}, `${((100 * times.totals[k]) / whole).toFixed(1)} %`), h("td", {}, seconds(times.totals[k] / times.count)))),
            h("tr", { class: "sum" }, h("td", {}, plural(times.count, "iteration")), h("td", {}, seconds(whole)), h("td", {}, "100.0 %"),
              h("td", {}, seconds(whole / times.count)))))),
      plot);
    drawBars(times, plot);
  };
  put(section, h("div", { class: "bar" },
    h("div", {}, h("h2", {}, "Phase times"), h("p", { class: "note" }, "Seconds of every iteration, compilation included in the first.")),
    DATA.times.length > 1 && choice("Phase of the run", DATA.times.map((t) => [t.phase, PHASE[t.phase]]), chosen, (phase) => { chosen = phase; draw(); })), body);
  draw();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
}
