// The small drawings: DP groups, requests, experts, traffic, the memory pool, what happens.
import { $, el, hueOf, ink, isDark, ms, paper, size, solid, tips } from "./draw.js";

let state, dirty = new Set(), at = {};
const ALL = ["groups", "requests", "heat", "traffic", "pool", "events"];
export function setState(next) {
  for (const name of ALL) if (!state || next[name] !== state[name]) dirty.add(name);
  if (next.pod !== state?.pod) dirty = new Set(ALL);
  state = next;
}
export function redraw() { dirty = new Set(ALL); }
export function tick() {  // one in each frame, so that no frame is late
  const [name] = dirty;
  if (!state || !name) return;
  dirty.delete(name);
  ({ groups, requests, heat, traffic, pool, events })[name]();
}

// A column for each DP group: blocks in use, cached ones above, running and waiting sequences as dots.
function groups() {
  const g = state.groups, sheet = paper($("group-bars"));
  if (!g || !sheet) return;
  const { c, w, h } = sheet, n = g.used.length, tes = state.pod.tes, gap = n > 100 ? 0 : n > 40 ? 1 : 3, wide = Math.min(34, (w - 6 * (tes.length - 1)) / n - gap), low = h - 16;
  at.groups = [];
  let x = 0, i = 0, labelled = -1;
  const rows = new Map(state.pod.dies.filter((row) => row[4] >= 0).map((row) => [`${row[1]} ${row[4]}`, row]));
  tes.forEach((te, t) => {
    const start = Math.max(x, labelled), end = start + c.measureText(te.name).width;
    if (start === x || end <= x + te.num_groups * (wide + gap)) { c.fillStyle = ink("dim"); c.fillText(te.name, start, h - 6); labelled = end + 8; }
    for (let rank = 0; rank < te.num_groups; rank++, i++) {
      const used = g.used[i] / te.num_blocks * low, cached = g.cached[i] / te.num_blocks * low;
      c.fillStyle = ink("soft"); c.fillRect(x, 0, wide, low);
      c.fillStyle = solid(hueOf(rows.get(`${t} ${rank}`) ?? [])); c.fillRect(x, low - used, wide, used);
      c.globalAlpha = 0.35; c.fillRect(x, low - used - cached, wide, cached); c.globalAlpha = 1;
      if (wide > 3) {
        c.fillStyle = ink("ink");
        for (let k = 0; k < Math.min(g.running[i], 6); k++) c.fillRect(x + 2 + (k % 3) * 4, 3 + Math.floor(k / 3) * 4, 3, 3);
        c.fillStyle = "#e59400";
        for (let k = 0; k < Math.min(g.waiting[i], 6); k++) c.fillRect(x + 2 + (k % 3) * 4, 12 + Math.floor(k / 3) * 4, 3, 3);
      }
      at.groups.push({ x, wide: wide + gap, te, rank, i });
      x += wide + gap;
    }
    x += 6;
  });
  const sum = (list) => list.reduce((a, b) => a + b, 0), asked = sum(g.queries), found = sum(g.hits);
  const text = `${n} group${n > 1 ? "s" : ""}; ${sum(g.used)} KV blocks used, ${sum(g.cached)} cached; prefix hits ${found} of ${asked} tokens`;
  $("groups-sum").textContent = text;
  $("group-bars").setAttribute("aria-label", `KV blocks by DP group: ${text}`);
}
function groupTip(x) {
  const found = at.groups?.find((each) => x >= each.x && x < each.x + each.wide), g = state?.groups;
  return found && g ? `${found.te.name}, DP group ${found.rank}\n${g.used[found.i]} of ${found.te.num_blocks} KV blocks used, ${g.cached[found.i]} cached\n${g.running[found.i]} running, ${g.waiting[found.i]} waiting\nprefix hits: ${g.hits[found.i]} of ${g.queries[found.i]} tokens` : "";
}

function requests() {
  const rows = state.requests?.rows ?? [], firsts = [];
  let first = 0;
  for (const te of state.pod.tes) { firsts.push([first, te]); first += te.num_groups; }
  const where = (group) => { const [base, te] = firsts.filter(([start]) => start <= group).at(-1) ?? []; return group < 0 || !te ? "–" : te.num_groups > 1 || state.pod.tes.length > 1 ? `${te.name}${te.num_groups > 1 ? `/${group - base}` : ""}` : te.name; };
  if (!rows.length) { $("requests").replaceChildren(el("p", { className: "none", textContent: "No request since you look." })); return; }
  const table = el("table", {}, el("tr", {}, ...["request", "at", "tokens", "TTFT", "TPOT"].map((text) => el("th", { textContent: text }))));
  for (const [id, group, what, tokens, ttft, tpot] of [...rows].reverse()) table.append(el("tr", { className: what === "ended" ? "none" : "", title: what }, ...[id, ["decode", "prefill", "ended"].includes(what) ? where(group) : what, tokens, ms(ttft), ms(tpot)].map((text) => el("td", { textContent: text }))));
  $("requests").replaceChildren(table);
}

function heat() {
  const data = state.heat, canvas = $("heat");
  if (!data?.layers.length) return;
  const sheet = paper(canvas, Math.max(40, Math.min(180, data.layers.length * 22)) + 16);
  if (!sheet) return;
  const { c, w, h } = sheet, left = 22, wide = (w - left) / data.columns.length, high = (h - 16) / data.layers.length, most = data.values.reduce((a, row) => Math.max(a, ...row), 1);
  at.heat = { left, wide, high };
  cells(c, data, most, left, wide, high);
  c.fillStyle = ink("dim");
  data.layers.forEach((layer, y) => { if (y % Math.ceil(15 / high) === 0) c.fillText(layer, 0, Math.max(6, y * high + high / 2)); });
  const what = data.unit === "rows" ? "expert" : "die", last = data.columns.at(-1);
  c.fillText(`${what} ${data.columns[0]}`, left, h - 7); c.textAlign = "right"; c.fillText(`${what} ${last}`, w, h - 7); c.textAlign = "left";
  const text = data.unit === "rows" ? `rows by layer and physical expert in the drawn step; at most ${most}` : `µs by layer and die with experts in the drawn step; at most ${most}`;
  $("heat-unit").textContent = text; canvas.setAttribute("aria-label", `Load of experts: ${text}`);
}
function heatTip(x, y) {
  const data = state?.heat, { left, wide, high } = at.heat ?? {};
  const column = Math.floor((x - left) / wide), line = Math.floor(y / high), value = data?.values[line]?.[column];
  return value === undefined ? "" : `layer ${data.layers[line]}, ${data.unit === "rows" ? "expert" : "die"} ${data.columns[column]}: ${value} ${data.unit === "rows" ? "rows" : "µs"}`;
}

// A pixel each, from a scale of 64 colours, made larger: there may be ten thousands of them. Zero is as pale as the ground.
function cells(c, { columns, layers, values }, most, left, wide, high) {
  const image = new ImageData(columns.length, layers.length), scale = Array.from({ length: 65 }, (_, i) => warm(i / 64));
  values.flat().forEach((value, i) => { if (value) image.data.set(scale[Math.round(64 * value / most)], 4 * i); });
  const small = new OffscreenCanvas(columns.length, layers.length);
  small.getContext("2d").putImageData(image, 0, 0);
  c.fillStyle = ink("soft"); c.fillRect(left, 0, columns.length * wide, layers.length * high);
  c.imageSmoothingEnabled = wide < 1; c.drawImage(small, left, 0, columns.length * wide, layers.length * high);
  c.fillStyle = ink("card");
  layers.forEach((_, y) => c.fillRect(left, (y + 1) * high - 1, columns.length * wide, 1));
  if (wide > 3) columns.forEach((_, x) => c.fillRect(left + (x + 1) * wide - 1, 0, 1, layers.length * high));
}
// From pale yellow to red, as red, green, blue and opacity.
function warm(share) {
  const hue = (45 - 38 * share) / 30, light = isDark() ? 0.22 + 0.4 * share : 0.88 - 0.42 * share, part = 0.92 * Math.min(light, 1 - light);
  const of = (n) => Math.round(255 * (light - part * Math.max(-1, Math.min((n + hue) % 12 - 3, 9 - (n + hue) % 12, 1))));
  return [of(0), of(8), of(4), 255];
}

// From whom (down) to whom (across), the dies that the pairs name.
function traffic() {
  const data = state.traffic;
  if (!data) return;
  const total = `${size(data.nbytes)} between ${data.num_pairs} pairs while the step was drawn`;
  $("traffic-sum").textContent = data.num_pairs ? total + (data.pairs.length < data.num_pairs ? `; the ${data.pairs.length} with most are drawn` : "") : { lockstep: "dies in lockstep exchange as one: no pairs", "time only": "a run in time only moves no bytes" }[state.pod.runs] ?? "nothing moved";
  const dies = [...new Set(data.pairs.flatMap(([a, b]) => [a, b]))].sort((a, b) => a - b), n = dies.length;
  const sheet = paper($("pairs"), n ? Math.min(230, 30 + n * 18) : 10);
  if (!sheet || !n) return;
  const { c, w, h } = sheet, left = 30, side = Math.min((w - left) / n, (h - 18) / n), index = new Map(dies.map((die, i) => [die, i])), most = data.pairs[0][2], rows = new Map(state.pod.dies.map((row) => [row[0], row]));
  at.pairs = { left, side, dies };
  c.fillStyle = ink("soft"); c.fillRect(left, 18, n * side, n * side);
  for (const [a, b, nbytes] of data.pairs) {
    const share = Math.sqrt(nbytes / most);
    c.globalAlpha = 0.15 + 0.85 * share; c.fillStyle = solid(hueOf(rows.get(a) ?? []));
    c.fillRect(left + index.get(b) * side, 18 + index.get(a) * side, Math.max(1, side - (side > 5 ? 1 : 0)), Math.max(1, side - (side > 5 ? 1 : 0)));
  }
  c.globalAlpha = 1; c.fillStyle = ink("dim");
  const every = Math.ceil(22 / side);
  dies.forEach((die, i) => { if (i % every) return; c.textAlign = "right"; c.fillText(die, left - 4, 18 + i * side + side / 2); c.textAlign = "center"; c.fillText(die, left + i * side + side / 2, 8); });
  c.textAlign = "left";
  if (w - left - n * side > 90) { c.fillText("from (down)", left + n * side + 10, 26); c.fillText("to (across)", left + n * side + 10, 41); }
  $("pairs").setAttribute("aria-label", `Bytes by pair of dies: ${total}; most from die ${data.pairs[0][0]} to die ${data.pairs[0][1]}, ${size(most)}`);
}
function pairTip(x, y) {
  const { left, side, dies } = at.pairs ?? {}, to = dies?.[Math.floor((x - left) / side)], from = dies?.[Math.floor((y - 18) / side)];
  const found = state?.traffic?.pairs.filter(([a, b]) => a === from && b === to) ?? [];
  return found.map(([a, b, n, plane]) => `die ${a} → die ${b}: ${size(n)} over ${plane === "ROCE" ? "RoCE" : plane}`).join("\n");
}

function pool() {
  $("pool").hidden = !state.pool;
  if (!state.pool) return;
  const { queries, hits, counts, usage } = state.pool, shown = (name, value) => name.endsWith("bytes") ? size(value) : value;
  $("pool-body").replaceChildren(el("p", { textContent: `${hits} of ${queries} tokens came from the pool` }), el("table", {}, ...[...Object.entries(usage), ...Object.entries(counts).filter(([, value]) => value)].map(([name, value]) => el("tr", {}, el("td", { textContent: name }), el("td", { textContent: shown(name, value) })))));
}
function events() {
  const rows = state.events?.rows ?? [];
  if (rows.length) $("event-list").replaceChildren(...[...rows].reverse().map(([, ns, kind, text]) => el("li", { className: kind }, el("time", { textContent: ms(ns) }), text)));
}
export function begin() {
  tips($("group-bars"), groupTip); tips($("heat"), heatTip); tips($("pairs"), pairTip);
  new ResizeObserver(redraw).observe($("groups"));
}
