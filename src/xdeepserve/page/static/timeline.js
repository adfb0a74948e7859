// The drawn step: a row for each die's kernels and exchanges, coloured by microbatch; waits are pale.
import { $, MICRO, hueOf, ink, ms, nameOf, paper, size, solid, tip } from "./draw.js";

const ROWS = { AIC: "AIC", AIV: "AIV", XCCL: "exchange", "XCCL microbatch 0": "exchange", "XCCL microbatch 1": "exchange", "A2E receive": "receive", "A2E receive: steps": "receive", "E2A send": "send", "E2A send: steps": "send", "stream 0: attention": "attention", "stream 1: experts": "experts", trampoline: "trampoline", DistFlow: "KV", "KV transfer": "KV", fault: "fault", recovery: "recovery" };
const ENGINES = ["MTE2", "MTE3", "SDMA", "DMA", "URMA", "ROCE", "VPC"], ORDER = ["attention", "experts", "AIC", "AIV", "exchange", "receive", "send", "trampoline", "KV", "recovery", "fault", ...ENGINES];
const WHOLE = new Set(["A2E receive", "E2A send"]);  // of which the steps are drawn, where there are some
const canvas = $("step"), HIGH = 13, MARGIN = () => Math.min(170, canvas.clientWidth * 0.3);
let zoomed = false, state, view = [0, 1], drawnFor = null, rows = [], engines = false, onPick = () => {};

export function setState(next) {
  const other = next.step !== state?.step;
  state = next;
  if (other) { rows = []; if (!zoomed && next.step) view = around(next.step); }
  drawnFor = null;
}
export function showEngines(on) { engines = on; rows = []; drawnFor = null; }
export function whole() { view = [0, 1]; zoomed = true; drawnFor = null; }
// Of a step of many layers some are drawn: the part of it in which these are.
function around(step) {
  const long = step.end_ns - step.start_ns, layered = step.spans.filter((span) => span[5] >= 0), from = Math.min(...layered.map((span) => span[3])), to = Math.max(...layered.map((span) => span[3] + span[4]));
  return layered.length && (to - from) < 0.6 * long ? [from / long, Math.min(1, to / long)] : [0, 1];
}
export function redraw() { drawnFor = null; }

function makeRows({ step, pod }) {
  const found = new Map(), steps = new Set(step.lanes.filter((lane) => lane.endsWith(": steps")).map((lane) => lane.slice(0, -7)));
  const has = new Set();
  for (const span of step.spans) if (step.lanes[span[1]].endsWith(": steps")) has.add(span[0]);
  const order = new Map(pod.dies.map((row, i) => [row[0], i]));
  for (const span of step.spans) {
    const lane = step.lanes[span[1]], kind = ROWS[lane] ?? (engines && ENGINES.includes(lane) ? lane : null);
    if (!kind || (WHOLE.has(lane) && steps.has(lane) && has.has(span[0]))) continue;
    const key = `${span[0]} ${kind}`;
    if (!found.has(key)) found.set(key, { die: span[0], kind, spans: [] });
    found.get(key).spans.push(span);
  }
  rows = [...found.values()].sort((a, b) => (order.get(a.die) ?? 1e6) - (order.get(b.die) ?? 1e6) || ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind));
  for (const row of rows) row.spans.sort((a, b) => b[8] - a[8] || a[3] - b[3]);
}

export function tick() {
  const step = state?.step;
  if (!step || drawnFor === step) return;
  if (!rows.length) makeRows(state);
  const sheet = paper(canvas, rows.length * HIGH + 24);
  if (!sheet) return;
  drawnFor = step;
  const { c, w, h } = sheet, left = MARGIN(), total = step.end_ns - step.start_ns, [from, to] = view.map((x) => x * total), scale = (w - left) / (to - from);
  $("step-name").textContent = `${step.te}, step ${step.step}: ${ms(total)}, ${step.num_rows} row${step.num_rows === 1 ? "" : "s"} of DP group ${step.group}${step.num_shown < step.num_dies ? `; ${step.num_shown} of ${step.num_dies} dies shown` : ""}${step.last_layer - step.first_layer + 1 < state.pod.num_layers ? `, layers ${step.first_layer} to ${step.last_layer}` : ""}${state.pod.runs === "tasks" ? "" : "; exchanges with their waits"}`;
  let y = 4, die = null;
  const known = new Map(state.pod.dies.map((row) => [row[0], row]));
  for (const row of rows) {
    const entry = known.get(row.die);
    if (row.die !== die) {
      c.fillStyle = ink("line"); c.fillRect(0, y - 1, w, 1);
      if (entry) { c.fillStyle = solid(hueOf(entry)); c.fillRect(0, y, 3, rows.filter((each) => each.die === row.die).length * HIGH - 2); }
    }
    c.fillStyle = ink(row.die !== die ? "ink" : "dim");
    c.fillText(`${row.die !== die ? entry && left > 130 ? shortName(entry) : entry ? row.die : `node ${row.die}` : ""}`, 7, y + HIGH / 2, left - 68);
    c.fillStyle = ink("dim"); c.textAlign = "right"; c.fillText(row.kind, left - 5, y + HIGH / 2); c.textAlign = "left";
    die = row.die;
    c.save(); c.beginPath(); c.rect(left, y, w - left, HIGH); c.clip();
    for (const span of row.spans) {
      const x = left + (span[3] - from) * scale, long = span[4] * scale;
      if (x > w || x + long < left) continue;
      c.globalAlpha = span[8] ? 0.16 : 1;
      c.fillStyle = span[6] < 0 ? ink("dim") : MICRO[span[6] % 4];
      c.fillRect(x, y + 1, Math.max(long, 0.7), HIGH - 3);
      if (long > 46 && !span[8]) { c.globalAlpha = 1; c.fillStyle = "#fff"; c.fillText(step.names[span[2]], x + 3, y + HIGH / 2, long - 5); }
    }
    c.restore(); c.globalAlpha = 1;
    y += HIGH;
  }
  c.fillStyle = ink("dim");
  const parts = w - left < 320 ? 2 : 4;  // of the axis
  for (let i = 0; i <= parts; i++) { c.textAlign = i === parts ? "right" : i ? "center" : "left"; c.fillText(ms(Math.round(from + (to - from) * i / parts)), left + (w - left) * i / parts, h - 9); }
  c.textAlign = "left";
  canvas.setAttribute("aria-label", `Timeline: ${$("step-name").textContent}`);
}
const shortName = (row) => `${row[0]} ${{ attention: `attn${row[3] > 0 || state.pod.tes[row[1]].num_domains > 1 ? ` d${row[3]}` : ""}`, experts: "experts", shared: "shared", prefill: "prefill", decode: "decode", both: `DP ${row[4]}` }[row[2]] ?? row[2]}`;

function spanAt(x, y) {
  const row = rows[Math.floor((y - 4) / HIGH)], left = MARGIN();
  if (!row || x < left || !state?.step) return null;
  const total = state.step.end_ns - state.step.start_ns, perPixel = total * (view[1] - view[0]) / (canvas.clientWidth - left), at = view[0] * total + (x - left) * perPixel;
  let best = null;
  for (const span of row.spans) if (span[3] - 2 * perPixel <= at && at <= span[3] + span[4] + 2 * perPixel && (!best || span[8] < best[8] || (span[8] === best[8] && span[4] < best[4]))) best = span;
  return best;
}
export function spanWords(span, { step, pod }) {
  const row = pod.dies.find((each) => each[0] === span[0]), where = [["layer", 5], ["microbatch", 6], ["domain", 7]].filter(([, i]) => span[i] >= 0).map(([name, i]) => `${name} ${span[i]}`).join(", ");
  return `${step.names[span[2]]}${span[8] ? " (waits for another die)" : ""}\n${ms(span[4])} from ${ms(span[3])} on\n${row ? nameOf(pod, row) : `node ${span[0]}`}${where ? `\n${where}` : ""}${span[9] >= 0 ? `\n${size(span[9])}` : ""}`;
}

export function begin(pick) {
  onPick = pick;
  let drag = null;
  canvas.addEventListener("pointermove", (event) => {
    if (drag && event.buttons) {
      const by = (drag.x - event.offsetX) / (canvas.clientWidth - MARGIN()) * (drag.view[1] - drag.view[0]);
      pan(drag.view, by); return;
    }
    const span = spanAt(event.offsetX, event.offsetY);
    tip(span ? spanWords(span, state) : "", event);
  });
  canvas.addEventListener("pointerleave", () => tip(""));
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, view }; });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && Math.abs(event.offsetX - drag.x) < 4) { const span = spanAt(event.offsetX, event.offsetY); if (span) onPick(span); }
    drag = null;
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.altKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (event.ctrlKey || event.altKey) zoom(Math.exp(event.deltaY / 200), event.offsetX); else pan(view, event.deltaX / canvas.clientWidth * (view[1] - view[0]));
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, event.offsetX));
  canvas.addEventListener("keydown", (event) => {
    const by = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": whole, ArrowLeft: () => pan(view, -(view[1] - view[0]) / 8), ArrowRight: () => pan(view, (view[1] - view[0]) / 8) }[event.key];
    if (by) { event.preventDefault(); event.stopPropagation(); by(); }
  });
  new ResizeObserver(() => { drawnFor = null; }).observe(canvas.parentElement);
}
function pan([from, to], by) {
  by = Math.max(-from, Math.min(1 - to, by));
  view = [from + by, to + by]; zoomed = true; drawnFor = null;
}
function zoom(factor, x = (canvas.clientWidth + MARGIN()) / 2) {
  const [from, to] = view, share = Math.max(0, (x - MARGIN()) / (canvas.clientWidth - MARGIN())), centre = from + (to - from) * share, wide = Math.min(1, Math.max(0.002, (to - from) * factor));
  const start = Math.max(0, Math.min(1 - wide, centre - wide * share));
  view = [start, start + wide]; zoomed = wide < 1; drawnFor = null;
}
