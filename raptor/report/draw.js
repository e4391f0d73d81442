"use strict";
// Charts as plotly traces and layouts, in the colours of the theme.

const EVERY = "every group";
const SYMBOLS = { all: "circle", cls: "square", registers: "triangle-up", patches: "diamond", pooled: "cross" };
const PALETTE = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6f00", "#14171c"],
  dark: ["#56b4e9", "#f0803c", "#2fc39b", "#e29cc3", "#e69f00", "#9fd3f5", "#f0e442", "#eceff3"],
};
const RAMP = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30"];

const theme = () => document.documentElement.dataset.theme;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// Plotly reads a little HTML in its texts: names must reach it as text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const short = (v) => (v == null ? "–" : Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4)));

function colourOf(key) {
  const [kind, index] = [key.slice(0, key.lastIndexOf("-")), key.slice(key.lastIndexOf("-") + 1)];
  if (kind === "palette") return PALETTE[theme()][Number(index) % 8];
  if (kind === "ramp") {
    const place = Math.min(RAMP.length - 1, Math.round(Number(index) * (RAMP.length - 1)));
    return theme() === "dark" ? RAMP[Math.max(2, place)] : RAMP[Math.min(6, place)];
  }
  return css(key) || css("ink");
}

function withAlpha(colour, alpha) {
  const hex = colour.replace("#", "");
  const part = (i) => parseInt(hex.slice(i, i + 2), 16);
  return `rgba(${part(0)},${part(2)},${part(4)},${alpha})`;
}

function shown(series, values) {
  return series.filter((s) =>
    Object.entries(s.when || {}).every(([name, allowed]) => values[name] === undefined || [].concat(allowed).includes(values[name])),
  );
}

function axis(spec, values = []) {
  const out = {
    title: { text: plain(spec.label || ""), standoff: 8, font: { size: 12, color: css("soft") } },
    gridcolor: css("grid"), zeroline: false, linecolor: css("line"), tickfont: { size: 11, color: css("soft") },
    automargin: true, fixedrange: true,
  };
  if (spec.log) Object.assign(out, { type: "log", tickformat: "~g", nticks: 7 });
  if (spec.log && spec.spread > 5) out.dtick = "D2"; // 1, 2, 5 a decade; every digit would overlap
  if (spec.range) out.range = spec.log ? spec.range.map(Math.log10) : spec.range;
  if (spec.from_zero) out.rangemode = "tozero";
  if (spec.integer && values.length) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    Object.assign(out, { range: [low - 0.5, high + 0.5], dtick: Math.max(1, Math.ceil((high - low) / 14)), tick0: low, showgrid: false });
  }
  return out;
}

function baseLayout() {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
    margin: { l: 8, r: 10, t: 12, b: 8 }, font: { family: css("sans"), color: css("ink"), size: 12 },
    hoverlabel: { bgcolor: css("paper"), bordercolor: css("line"), font: { color: css("ink"), family: css("sans"), size: 12 } },
    shapes: [],
  };
}

function phaseBands(chart, values) {
  const [low, high] = [Math.min(...values) - 0.5, Math.max(...values) + 0.5];
  let start = 0;
  return (chart.phases || []).map((length, j) => {
    const [x0, x1] = [start + chart.offset, start + length + chart.offset];
    start += length;
    return {
      type: "rect", xref: "x", yref: "paper", x0: Math.max(x0, low), x1: Math.min(x1, high), y0: 0, y1: 1,
      fillcolor: withAlpha(css(`phase-${j % 7}`), theme() === "dark" ? 0.13 : 0.12), line: { width: 0 }, layer: "below",
    };
  });
}

function band(s, colour) {
  const keep = s.x.map((_, i) => i).filter((i) => s.lower[i] != null && s.upper[i] != null);
  return {
    type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false, line: { width: 0 }, fill: "toself",
    fillcolor: withAlpha(colour, 0.16), x: [...keep.map((i) => s.x[i]), ...keep.map((i) => s.x[i]).reverse()],
    y: [...keep.map((i) => s.lower[i]), ...keep.map((i) => s.upper[i]).reverse()],
  };
}

const DASHES = { surrogate: "dash", twin: "dot", null: "dot" };
const isControl = (s) => s.side === "null" || s.side === "twin";

function lineTrace(s, i) {
  const colour = colourOf(s.colour);
  const open = s.side === "surrogate" ? "-open" : "";
  let mode = s.text ? "lines+markers+text" : "lines+markers";
  if (isControl(s) || s.plain) mode = "lines";
  return {
    type: "scatter", name: plain(s.name), x: s.x, y: s.y, connectgaps: false, mode,
    // Words above one curve and below the next do not meet.
    text: s.text ? s.text.map(plain) : undefined, textposition: i % 2 ? "bottom center" : "top center",
    textfont: { size: 11, color: css("soft") },
    line: { color: colour, width: isControl(s) ? 1.6 : 2.2, dash: DASHES[s.side] || "solid" },
    marker: { symbol: (SYMBOLS[s.colour] || "circle") + open, size: s.x.length > 24 ? 4 : 6.5, color: colour },
    hovertemplate: "%{y:.4~g}",
  };
}

function drawLines(chart, series) {
  const layout = baseLayout(), xs = series.flatMap((s) => s.x);
  const positive = series.flatMap((s) => s.y).filter((v) => v > 0);
  const spread = Math.max(...positive) / Math.min(...positive);
  const y = { ...chart.y, label: chart.y.label || series[0]?.unit, spread };
  const few = series.filter((s) => !isControl(s)).length <= 2;
  const bands = few ? series.filter((s) => s.lower && s.upper).map((s) => band(s, colourOf(s.colour))) : [];
  Object.assign(layout, { xaxis: axis(chart.x, xs), yaxis: axis(y), hovermode: "x unified" });
  if (chart.y.clip) layout.yaxis.range = clipped(chart.y, series);
  layout.shapes = phaseBands(chart, xs);
  if (chart.level != null) layout.shapes.push(rule("y", chart.level));
  if (chart.mark != null) layout.shapes.push(rule("x", chart.mark));
  return { traces: [...bands, ...series.map(lineTrace)], layout };
}

// The range of all curves, but null models and the twin may not push it past the limits.
function clipped(spec, series) {
  const [low, high] = spec.clip;
  const ends = (list) => [Math.min(...list), Math.max(...list)];
  const values = (list) => list.flatMap((s) => s.y).filter((v) => v != null);
  const own = ends(values(series.filter((s) => !isControl(s))));
  const all = ends(values(series));
  let bottom = Math.min(Math.max(low, all[0]), own[0]);
  let top = Math.max(Math.min(high, all[1]), own[1]);
  if (!isFinite(bottom) || !isFinite(top)) return spec.log ? [low, high].map(Math.log10) : [low, high];
  if (spec.log) return [Math.log10(bottom / 1.2), Math.log10(top * 1.2)];
  if (low === 0) bottom = Math.min(bottom, 0); // the best value of an error
  if (high === 1) top = Math.max(top, 1); // the best value of a share
  const margin = 0.05 * (top - bottom);
  return [bottom === 0 ? 0 : bottom - margin, top + margin];
}

function rule(direction, value) {
  const across = { y: { xref: "paper", x0: 0, x1: 1, yref: "y", y0: value, y1: value }, x: { yref: "paper", y0: 0, y1: 1, xref: "x", x0: value, x1: value } };
  return { type: "line", ...across[direction], line: { color: css("soft"), width: 1.4, dash: "dot" }, layer: "below" };
}

function drawBars(chart, series) {
  const layout = baseLayout();
  Object.assign(layout, { xaxis: axis(chart.x), yaxis: axis(chart.y), barmode: "group", bargap: Math.max(0.45, 1 - 0.2 * series[0].x.length), bargroupgap: 0.12 });
  layout.xaxis.showgrid = false;
  layout.xaxis.type = "category";
  if (chart.level != null) layout.shapes.push({ ...rule("y", chart.level), layer: "above" });
  const traces = series.map((s) => ({
    type: "bar", name: plain(s.name), x: s.x.map(plain), y: s.y, marker: { color: colourOf(s.colour), cornerradius: 5 },
    text: s.y.map((v) => (v == null ? "–" : String(+v.toPrecision(3)))), textposition: "outside", textangle: 0, cliponaxis: false,
    hovertemplate: "%{x}: %{y:.4~g}<extra>%{fullData.name}</extra>",
  }));
  return { traces, layout };
}

// Points of one fit per image: more than these lie on top of each other.
function thinned(s) {
  const step = Math.ceil(s.x.length / 96);
  const few = (list) => list.filter((_, i) => i % step === 0);
  return step > 1 ? { ...s, x: few(s.x), y: few(s.y) } : s;
}

function pointSymbol(s) {
  if (s.large) return s.side === "surrogate" ? "diamond-open-dot" : "diamond-open";
  return (SYMBOLS[s.colour] || "circle") + (s.side === "surrogate" ? "-open" : "");
}

function drawPoints(chart, series) {
  const layout = baseLayout();
  Object.assign(layout, { xaxis: axis(chart.x), yaxis: axis(chart.y), hovermode: "closest" });
  if (chart.circle) {
    layout.shapes = [{ type: "circle", x0: -1, x1: 1, y0: -1, y1: 1, line: { color: css("soft"), width: 1.2, dash: "dot" }, layer: "below" }];
    Object.assign(layout.xaxis, { dtick: 0.5, constrain: "domain" });
    Object.assign(layout.yaxis, { dtick: 0.5, scaleanchor: "x" });
  }
  const traces = series.map(thinned).map((s) => ({
    type: "scatter", mode: "markers", name: plain(s.name), x: s.x, y: s.y,
    marker: {
      color: colourOf(s.colour), opacity: s.large ? 1 : 0.6, size: s.large ? 10 : 6, symbol: pointSymbol(s),
      line: { width: s.side === "surrogate" || s.large ? 2 : 0 },
    },
    hovertemplate: "%{x:.4~g}, %{y:.4~g}<extra>%{fullData.name}</extra>",
  }));
  return { traces, layout };
}

function drawHeatmap(chart, series, values) {
  const layout = baseLayout(), map = series[0];
  if (!map) return { traces: [], layout };
  const labels = map.z.map((_, i) => i + 1);
  const scale = [[0, css("low")], [1, css("high")]];
  Object.assign(layout, { xaxis: axis(chart.x, labels), yaxis: axis(chart.y, labels) });
  Object.assign(layout.xaxis, { constrain: "domain", side: "bottom" });
  Object.assign(layout.yaxis, { scaleanchor: "x", constrain: "domain", range: [map.z.length + 0.5, 0.5] });
  layout.shapes = outlines(map.cuts?.[values.k]);
  layout.margin.b = 104; // the axis, and the colour bar below it
  const traces = [{
    type: "heatmap", z: map.z, x: map.z[0].map((_, i) => i + 1), y: labels, colorscale: scale, xgap: 1, ygap: 1,
    colorbar: { orientation: "h", thickness: 9, len: 0.9, yref: "container", y: 0.01, yanchor: "bottom", outlinewidth: 0, nticks: 6, tickfont: { size: 11, color: css("soft") }, title: { text: plain(map.unit), side: "bottom", font: { size: 12, color: css("soft") } } },
    hovertemplate: `${chart.cells} %{y} and %{x}<br>${plain(map.unit)} %{z:.4f}<extra></extra>`,
  }];
  return { traces, layout };
}

function outlines(lengths) {
  let start = 0;
  return (lengths || []).map((length) => {
    const [low, high] = [start + 0.5, start + length + 0.5];
    start += length;
    return { type: "rect", x0: low, x1: high, y0: low, y1: high, line: { color: css("focus"), width: 3 } };
  });
}

function drawPaths(chart, series, values, solid) {
  const depth = Number(values.depth), layout = baseLayout(), axes = series[0] ? series[0].axes : ["", "", ""];
  const traces = series.flatMap((s) => {
    const colour = colourOf(s.colour), name = plain(s.name);
    const upTo = (list) => list.slice(0, depth + 1);
    const kind = solid ? { type: "scatter3d" } : { type: "scatter" };
    const whole = { ...kind, name, x: s.x, y: s.y, mode: "lines", opacity: 0.3, hoverinfo: "skip", showlegend: false, line: { color: colour, width: solid ? 3 : 1.5 } };
    const past = {
      ...kind, name, x: upTo(s.x), y: upTo(s.y), mode: "lines+markers", line: { color: colour, width: solid ? 6 : 2.5 },
      marker: { color: colour, size: upTo(s.x).map((_, i) => (i === depth ? (solid ? 10 : 14) : solid ? 2.5 : 4)), opacity: 1, line: { width: 0 } },
      text: upTo(s.x).map((_, i) => `layer ${i}`), hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
    };
    if (solid) { whole.z = s.z; past.z = upTo(s.z); }
    return [whole, past];
  });
  layout.uirevision = `${values.model}-${values.tokens}`;
  const flat = (i) => ({ ...axis({ label: axes[i] }) });
  if (!solid) return { traces, layout: { ...layout, xaxis: flat(0), yaxis: flat(1), hovermode: "closest" } };
  const solidAxis = (i) => ({
    title: { text: plain(axes[i]), font: { size: 12, color: css("soft") } }, gridcolor: css("line"), zeroline: false,
    tickfont: { size: 10, color: css("soft") }, backgroundcolor: "rgba(0,0,0,0)", nticks: 5,
    range: reach(series.flatMap((s) => [s.x, s.y, s.z][i])),
  });
  layout.scene = { xaxis: solidAxis(0), yaxis: solidAxis(1), zaxis: solidAxis(2), dragmode: "orbit", aspectmode: "cube", camera: { eye: { x: 1.2, y: 1.35, z: 0.6 }, center: { x: 0, y: 0, z: -0.18 } } };
  layout.margin = { l: 0, r: 0, t: 0, b: 0 };
  return { traces, layout };
}

function reach(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)], margin = 0.06 * (high - low || 1);
  return [low - margin, high + margin];
}

let webgl = null;
function hasWebgl() {
  if (webgl === null) {
    const canvas = document.createElement("canvas");
    webgl = Boolean(canvas.getContext("webgl") || canvas.getContext("experimental-webgl"));
  }
  return webgl;
}

function figureOf(chart, values, hidden) {
  const series = shown(chart.series, values).filter((s) => !hidden.has(s.base || s.name) && !hidden.has(`side:${s.side}`));
  if (chart.kind === "bars") return drawBars(chart, series);
  if (chart.kind === "points") return drawPoints(chart, series);
  if (chart.kind === "heatmap") return drawHeatmap(chart, series, values);
  if (chart.kind === "paths") return drawPaths(chart, series, values, hasWebgl());
  return drawLines(chart, series);
}

// Tables and CSV ---------------------------------------------------------------------------------------------------

function csvCell(value) {
  if (value == null) return "";
  if (typeof value === "number") return String(value);
  let text = String(value);
  if (/^[=+\-@\t\r]/.test(text)) text = `'${text}`; // a spreadsheet would run it
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

const toCsv = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

// Every value of the chart, in long form, with the controls' values as columns.
function longRows(chart) {
  const names = [...new Set(chart.series.flatMap((s) => Object.keys(s.when || {})))];
  const labels = Object.fromEntries(chart.controls.map((c) => [c.name, Object.fromEntries(c.options)]));
  const chosen = (s) => names.map((n) => { const v = [].concat((s.when || {})[n] ?? "")[0]; return n === "eps" ? Number(labels.eps[v]) : v; });
  if (chart.kind === "heatmap") {
    const rows = chart.series.flatMap((s) => s.z.flatMap((row, i) => row.map((v, j) => [...chosen(s), i + 1, j + 1, v])));
    return [[...names, `${chart.y.label} (row)`, `${chart.x.label} (column)`, "value"], ...rows];
  }
  if (chart.kind === "paths") {
    const rows = chart.series.flatMap((s) => s.x.map((x, i) => [...chosen(s), s.name, i, x, s.y[i], s.z[i]]));
    return [[...names, "class", "layer", "PC1", "PC2", "PC3"], ...rows];
  }
  const spread = chart.series.some((s) => s.lower);
  const rows = chart.series.flatMap((s) => s.x.map((x, i) => [...chosen(s), s.name, x, s.y[i], ...(spread ? [s.lower?.[i], s.upper?.[i]] : [])]));
  return [[...names, "series", chart.x.label, chart.y.label || "value", ...(spread ? ["lower", "upper"] : [])], ...rows];
}

// What is on view, in wide form: one row an x, one column a series.
function wideRows(chart, values) {
  const series = shown(chart.series, values);
  if (chart.kind === "heatmap") return series.length ? [["layer", ...series[0].z[0].map((_, j) => j + 1)], ...series[0].z.map((row, i) => [i + 1, ...row])] : [];
  if (chart.kind === "paths") return [["class, layer", "PC1", "PC2", "PC3"], ...series.flatMap((s) => s.x.map((x, i) => [`${s.name}, ${i}`, x, s.y[i], s.z[i]]))];
  if (chart.kind === "points") return [["series", chart.x.label, chart.y.label], ...series.flatMap((s) => s.x.map((x, i) => [s.name, x, s.y[i]]))];
  const xs = [...new Set(series.flatMap((s) => s.x))];
  if (xs.every((x) => typeof x === "number")) xs.sort((a, b) => a - b);
  return [[chart.x.label, ...series.map((s) => s.name)], ...xs.map((x) => [x, ...series.map((s) => s.y[s.x.indexOf(x)] ?? null)])];
}
