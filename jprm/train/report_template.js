// The page's shell: data, element helpers, number formats, header and config. Text of the run only ever becomes text nodes.
const DATA = JSON.parse(document.getElementById("data").textContent);
const PHASE = { sft: "SFT", prm: "PRM", rl: "RL", eval: "Eval" };
const COLOURS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)"];
const byId = (id) => document.getElementById(id);

function make(namespace, tag, attributes, children) {
  const element = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(name, value === true ? "" : value);
  }
  return put(element, ...children);
}
function put(element, ...children) { // append() would write `false` and `null` as words
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}
function fill(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}
const h = (tag, attributes, ...children) => make(null, tag, attributes, children);
const s = (tag, attributes, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);

const minus = (text) => text.replace("-", "\u2212");
function short(x) { // four significant digits, aligned by tabular figures
  if (x === null || x === undefined) return "–";
  const a = Math.abs(x);
  if (a === 0) return "0";
  if (a >= 1e5 || a < 1e-3) return minus(x.toExponential(2).replace("e+", "e"));
  return minus(a >= 1000 ? Math.round(x).toLocaleString("en-US") : x.toPrecision(a >= 100 ? 4 : 3));
}
const signed = (x, digits = 3) => (x === null || x === undefined ? "–" : (x > 0 ? "+" : "") + minus(x.toFixed(digits)));
const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
function seconds(x) {
  if (x >= 3600) return `${Math.floor(x / 3600)} h ${String(Math.floor((x % 3600) / 60)).padStart(2, "0")} min`;
  if (x >= 120) return `${Math.floor(x / 60)} min ${String(Math.round(x % 60) % 60).padStart(2, "0")} s`;
  return x >= 10 ? `${x.toFixed(1)} s` : x >= 0.1 ? `${x.toFixed(2)} s` : `${(x * 1000).toFixed(1)} ms`;
}
function niceTicks(low, high, about) {
  const raw = (high - low) / Math.max(1, about), power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) ticks.push(i * size);
  return { ticks, size };
}

function choice(label, options, current, pick) {
  const buttons = options.map(([value, text, enabled = true]) => h("button", {
    type: "button", "aria-pressed": String(value === current), disabled: !enabled,
    onclick: (event) => {
      for (const b of buttons) b.setAttribute("aria-pressed", String(b === event.currentTarget));
      pick(value);
    },
  }, text));
  return h("span", { class: "choice", role: "group", "aria-label": label }, buttons);
}

const tip = byId("tip");
function showTip(event, ...content) {
  fill(tip, content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 18;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${below + box.height > innerHeight - 8 ? event.clientY - box.height - 12 : below}px`;
}
const hideTip = () => { tip.hidden = true; };

function dumbbell(row) { // where the value went on a line from 0 to 1
  const at = (v) => `${Math.max(0, Math.min(1, v)) * 100}%`;
  const has = (v) => v !== null && v !== undefined;
  if (!has(row.from) && !has(row.to)) return null;
  return s("svg", { role: "img", "aria-label": `${row.before || ""} to ${row.after || ""}` },
    s("line", { x1: "0", x2: "100%", y1: 6, y2: 6, style: { stroke: "var(--line)", "stroke-width": 2 } }),
    has(row.from) && has(row.to) && s("line", { x1: at(row.from), x2: at(row.to), y1: 6, y2: 6,
      style: { stroke: row.to >= row.from ? "var(--good)" : "var(--bad)", "stroke-width": 2.5 } }),
    has(row.from) && s("circle", { cx: at(row.from), cy: 6, r: 3.6, style: { fill: "var(--paper)", stroke: "var(--muted)", "stroke-width": 1.6 } }),
    has(row.to) && s("circle", { cx: at(row.to), cy: 6, r: 4.4,
      style: { fill: has(row.from) && row.to < row.from ? "var(--bad)" : "var(--good)" } }));
}

function drawHeadline() {
  const rows = DATA.headline.map((row) => h("tr", {},
    h("td", {}, row.label),
    h("td", { class: "was" }, row.before ? [row.against === "chance" ? h("small", {}, "chance") : "", row.before] : ""),
    h("td", { class: "now" }, row.after || "–"),
    h("td", { class: row.change ? (row.change.startsWith("+") ? "up" : "down") : "" }, row.change || ""),
    h("td", { class: "range" }, dumbbell(row))));
  return h("table", { class: "headline" },
    h("thead", {}, h("tr", {}, h("th", {}, "Result"), h("th", {}, "Before"), h("th", {}, "After"), h("th", {}, "Change"),
      h("th", { class: "range" }, ""))),
    h("tbody", {}, rows));
}

function drawHeader() {
  const links = [["curves", "Curves", DATA.groups.length], ["times", "Phase times", DATA.times.length],
    ["rollouts", "Rollouts", DATA.rollouts.iterations.length], ["config", "Config", DATA.config.length]];
  const word = { sft: "step", prm: "step", rl: "iteration" };
  const facts = DATA.highlights.length > 0 && h("dl", { class: "first" }, DATA.highlights.map(([k, v]) => [h("dt", {}, k), h("dd", {}, v)]));
  put(byId("header"),
    h("div", { class: "top" },
      h("div", {}, h("p", { class: "eyebrow" }, "jprm run report"), h("h1", {}, DATA.name)),
      h("nav", {}, links.filter((l) => l[2]).map(([id, text]) => h("a", { href: `#${id}` }, text)))),
    h("p", { class: "track" }, DATA.phases.map((p) => h("span", {}, h("b", {}, PHASE[p.name]), ` ${plural(p.count, word[p.name])}`))),
    DATA.notes.map((text) => h("p", { class: "note" }, text)),
    h("div", { class: "overview" }, DATA.headline.length > 0 && h("div", {}, drawHeadline()), facts));
}

function drawConfig() {
  const section = byId("config");
  if (!DATA.config.length) return;
  section.hidden = false;
  put(section, h("details", {}, h("summary", {}, "Config"),
    h("div", { class: "all" }, DATA.config.map(([k, v]) => h("div", {}, h("span", {}, k), h("b", {}, v))))));
}

function start() {
  drawHeader();
  drawCurves();
  drawTimes();
  drawRollouts();
  drawConfig();
}
