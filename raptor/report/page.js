"use strict";
// The page itself: unpack plotly, build controls, draw, download, switch the theme.

const page = JSON.parse(document.getElementById("data").textContent);
const PRINT_WIDTH = 680; // of a sheet of A4 between its margins, in CSS pixels
const state = { section: {}, chart: {}, hidden: {} };
const sectionOf = {};
for (const [section, ids] of Object.entries(page.sections)) ids.forEach((id) => (sectionOf[id] = section));

async function unpackPlotly() {
  const holder = document.getElementById("plotly");
  const bytes = Uint8Array.from(atob(holder.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  holder.remove();
  document.head.append(script);
}

const valuesOf = (id) => ({ ...state.section[sectionOf[id]], ...state.chart[id] });
const figure = (id) => document.getElementById(`chart-${id}`);

function draw(id) {
  if (typeof Plotly === "undefined") return; // not unpacked yet; everything is drawn when it is
  const chart = page.charts[id], values = valuesOf(id), box = figure(id), plot = box.querySelector(".plot");
  const { traces, layout } = figureOf(chart, values, state.hidden[id]);
  Plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true, scrollZoom: false });
  if (chart.kind !== "heatmap") drawLegend(id, shown(chart.series, values));
  const readout = box.querySelector(".readout");
  if (readout) readout.textContent = readoutOf(chart, values);
  if (box.querySelector("details.data").open) fillTable(id);
}

function readoutOf(chart, values) {
  if (chart.kind === "paths") return `Layer ${values.depth} of ${chart.series[0].x.length - 1}`;
  const map = shown(chart.series, values)[0], lengths = map?.cuts?.[values.k];
  if (!lengths) return "No cut at this k for this model.";
  const phase = lengths.flatMap((n, j) => Array(n).fill(j)), sums = { within: [0, 0], across: [0, 0] };
  map.z.forEach((row, i) => row.forEach((v, j) => {
    if (i === j || v == null) return;
    const sum = sums[phase[i] === phase[j] ? "within" : "across"];
    sum[0] += v;
    sum[1] += 1;
  }));
  const mean = ([total, count]) => (count ? (total / count).toFixed(3) : "–");
  return `${lengths.length} phase${lengths.length === 1 ? "" : "s"}: ${lengths.join(" | ")} · mean within a phase ${mean(sums.within)}, across ${mean(sums.across)}`;
}

function drawLegend(id, series) {
  const box = figure(id), names = legendItems(series);
  let legend = box.querySelector(".legend");
  if (!legend) {
    legend = element("div", { className: "legend", role: "group", "aria-label": "Show or hide curves" });
    box.querySelector(".plot").after(legend);
  }
  const key = names.map((s) => s.key).join("\n") + theme();
  if (legend.dataset.key === key) return;
  legend.dataset.key = key;
  legend.hidden = names.length < 2;
  legend.replaceChildren(...names.map((s) => legendButton(id, s)));
}

const MODELS = { teacher: "teacher", surrogate: "surrogate", twin: "untrained twin" };

// One entry per curve; where several models share their colours, one per colour and one per model.
function legendItems(series) {
  const items = new Map();
  for (const s of series) {
    const key = s.base || s.name;
    const side = s.base && s.side in MODELS ? "teacher" : s.side;
    if (!items.has(key)) items.set(key, { key, text: key, colour: s.colour, side });
  }
  const present = Object.keys(MODELS).filter((side) => series.some((s) => s.base && s.side === side));
  if (present.length > 1) {
    for (const side of present) items.set(`side:${side}`, { key: `side:${side}`, text: MODELS[side], colour: "soft", side });
  }
  return [...items.values()];
}

function legendButton(id, s) {
  const hidden = state.hidden[id];
  const button = element("button", { type: "button", "aria-pressed": String(!hidden.has(s.key)) });
  const mark = document.createElementNS(SVG, "svg"), stroke = document.createElementNS(SVG, "line");
  mark.setAttribute("width", 22);
  mark.setAttribute("height", 8);
  mark.setAttribute("aria-hidden", "true");
  const dash = { surrogate: "5 3", twin: "2 2", null: "2 2" }[s.side] || "none";
  for (const [k, v] of Object.entries({ x1: 0, x2: 22, y1: 4, y2: 4, stroke: colourOf(s.colour), "stroke-width": 3, "stroke-dasharray": dash })) stroke.setAttribute(k, v);
  mark.append(stroke);
  button.append(mark, s.text);
  button.addEventListener("click", () => {
    if (hidden.has(s.key)) hidden.delete(s.key); else hidden.add(s.key);
    button.setAttribute("aria-pressed", String(!hidden.has(s.key)));
    draw(id);
  });
  return button;
}

// Controls ---------------------------------------------------------------------------------------------------------

function buildControl(control, values, changed, scope) {
  const set = (value) => { values[control.name] = value; changed(); };
  values[control.name] = control.options.some(([v]) => v === control.start) ? control.start : control.options[0][0];
  if (control.options.length < 2 && !control.slider) return null;
  if (control.slider) return slider(control, values, set);
  const labels = control.options.map(([, label]) => label);
  const long = labels.join("").length > 48 || labels.some((label) => label.length > 20);
  return long ? chooser(control, values, set) : choices(control, values, set, scope);
}

function slider(control, values, set) {
  const options = control.options, at = options.findIndex(([v]) => v === values[control.name]);
  const input = element("input", { type: "range", min: 0, max: options.length - 1, step: 1 });
  input.value = at;
  input.dataset.control = control.name;
  const output = element("output", { textContent: options[at][1] });
  const go = (i) => { input.value = i; output.textContent = options[i][1]; input.setAttribute("aria-valuetext", options[i][1]); set(options[i][0]); };
  input.setAttribute("aria-valuetext", options[at][1]);
  input.addEventListener("input", () => go(Number(input.value)));
  const label = element("label", { className: "control" }, element("span", { textContent: control.label }), input, output);
  if (control.name !== "depth") return label;
  return element("div", { className: "control" }, label, playButton(() => go((Number(input.value) + 1) % options.length)));
}

function chooser(control, values, set) {
  const select = element("select");
  select.dataset.control = control.name;
  select.append(...control.options.map(([value, label]) => element("option", { value, textContent: label, selected: value === values[control.name] })));
  select.addEventListener("change", () => set(select.value));
  return element("label", { className: "control" }, element("span", { textContent: control.label }), select);
}

function choices(control, values, set, scope) {
  const group = element("span", { className: "choices", role: "radiogroup", "aria-label": control.label });
  control.options.forEach(([value, label]) => {
    const input = element("input", { type: "radio", name: `${scope}-${control.name}`, value, checked: value === values[control.name] });
    input.dataset.control = control.name;
    input.addEventListener("change", () => set(value));
    group.append(element("label", {}, input, label));
  });
  return element("div", { className: "control" }, element("span", { textContent: control.label }), group);
}

function buildControls() {
  for (const [section, controls] of Object.entries(page.controls)) {
    const values = (state.section[section] = {});
    const built = controls.map((c) => buildControl(c, values, () => page.sections[section].forEach(draw), section)).filter(Boolean);
    document.querySelector(`[data-section="${section}"]`)?.append(...built);
  }
  for (const [id, chart] of Object.entries(page.charts)) {
    const values = (state.chart[id] = {});
    state.hidden[id] = new Set();
    const built = chart.controls.map((c) => buildControl(c, values, () => draw(id), id)).filter(Boolean);
    figure(id).querySelector("[data-controls]").append(...built);
  }
}

// Tables and downloads ---------------------------------------------------------------------------------------------

function fillTable(id) {
  const [head, ...rows] = wideRows(page.charts[id], valuesOf(id));
  const table = element("table");
  const cells = (tag, row) => row.map((v) => element(tag, { textContent: typeof v === "number" ? short(v) : v ?? "–" }));
  if (head) table.append(element("thead", {}, element("tr", {}, ...cells("th", head))), element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row)))));
  figure(id).querySelector("details.data .scroll").replaceChildren(table);
}

function save(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: `${page.name}-${name}` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

async function download(id, kind) {
  const chart = page.charts[id];
  if (kind === "csv") return save(`${id}.csv`, new Blob([toCsv(longRows(chart))], { type: "text/csv" }));
  const { traces, layout } = figureOf(chart, valuesOf(id), state.hidden[id]);
  const square = chart.kind === "heatmap" || chart.circle;
  const size = { width: square ? 760 : 960, height: square ? 720 : chart.kind === "paths" ? 760 : 560 };
  Object.assign(layout, {
    ...size, showlegend: chart.kind !== "heatmap" && traces.length > 1, paper_bgcolor: css("paper"), margin: { l: 70, r: 30, t: 60, b: 60 },
    title: { text: plain(chart.title), font: { size: 18 }, x: 0.02, xanchor: "left" }, legend: { orientation: "h", y: -0.18 },
  });
  if (layout.scene) layout.scene.camera = figure(id).querySelector(".plot")._fullLayout?.scene?._scene?.getCamera() || layout.scene.camera;
  const url = await Plotly.toImage({ data: traces, layout }, { format: kind, scale: kind === "png" ? 2 : 1, ...size });
  save(`${id}.${kind}`, dataBlob(url));
}

function dataBlob(url) {
  const comma = url.indexOf(","), head = url.slice(5, comma), body = url.slice(comma + 1);
  const text = head.includes("base64") ? atob(body) : decodeURIComponent(body);
  const bytes = head.includes("base64") ? Uint8Array.from(text, (c) => c.charCodeAt(0)) : text;
  return new Blob([bytes], { type: head.split(";")[0] });
}

// Start ------------------------------------------------------------------------------------------------------------

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").setAttribute("aria-pressed", String(name === "dark"));
}

function watchSections() {
  const links = new Map([...document.querySelectorAll(".bar nav a")].map((a) => [a.hash.slice(1), a]));
  const observer = new IntersectionObserver((entries) => entries.filter((e) => e.isIntersecting).forEach((e) => {
    links.forEach((a) => a.removeAttribute("aria-current"));
    links.get(e.target.id)?.setAttribute("aria-current", "true");
  }), { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main section").forEach((s) => observer.observe(s));
}

function listen(ids) {
  const switchTo = (name) => { setTheme(name); ids.forEach(draw); };
  document.getElementById("theme").addEventListener("click", () => {
    const name = theme() === "dark" ? "light" : "dark";
    try { localStorage.setItem("raptor-theme", name); } catch { /* then it is forgotten */ }
    switchTo(name);
  });
  systemDark.addEventListener("change", (event) => { if (!remembered()) switchTo(event.matches ? "dark" : "light"); });
  for (const id of ids) {
    figure(id).querySelectorAll("[data-download]").forEach((b) => b.addEventListener("click", () => download(id, b.dataset.download)));
    figure(id).querySelector("details.data").addEventListener("toggle", () => fillTable(id));
  }
  let before = null;
  addEventListener("beforeprint", () => {
    document.documentElement.style.setProperty("--print-zoom", Math.min(1, PRINT_WIDTH / document.querySelector("main").clientWidth));
    document.querySelectorAll(".plot").forEach((p) => (p.style.minHeight = `${p.clientHeight}px`));
    before = theme();
    if (before === "dark") switchTo("light");
  });
  addEventListener("afterprint", () => {
    document.querySelectorAll(".plot").forEach((p) => (p.style.minHeight = ""));
    if (before === "dark") switchTo("dark");
  });
}

async function start() {
  const ids = Object.values(page.sections).flat();
  setTheme(theme());
  buildControls();
  listen(ids);
  watchSections();
  if (page.images && document.getElementById("strip")) new Strip(document.getElementById("strip"), page.images);
  if (!("DecompressionStream" in window)) {
    document.querySelector("main").prepend(element("p", { className: "hint", textContent: "This browser is too old to unpack the figures. The tables below each of them still work." }));
    return;
  }
  await unpackPlotly();
  for (const id of ids) {
    draw(id);
    await new Promise((done) => setTimeout(done));
  }
  document.documentElement.dataset.ready = "true";
}

start();
