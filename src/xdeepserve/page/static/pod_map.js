// The dies of the pod: by role or by server, coloured by load; bytes between them; lost ones crossed out.
import { $, colour, hueOf, ink, isDark, ms, nameOf, paper, place, size, solid, tips } from "./draw.js";

const PLANES = { UB: [], ROCE: [6, 4], VPC: [2, 3] };
const canvas = $("map");
let state, boxes = [], labels = [], at = new Map(), arrangement = "role", arcs = true, laidFor = "", moving = true, chosen = null, focus = 0;
const quiet = matchMedia("(prefers-reduced-motion: reduce)").matches;
export const timing = { frames: 0, since: 0, worst: 0, last: 0 };

export function setState(next) { state = next; moving = true; }
export function choose(die) { chosen = die; moving = true; }
export function arrange(how) { arrangement = how; laidFor = ""; moving = true; }
export function showArcs(on) { arcs = on; moving = true; }
export function redraw() { laidFor = ""; moving = true; }

// Sections of dies with a label each: of one role and domain of a TE, or of one server.
function sections(pod) {
  const found = new Map(), gone = state.now.lost.filter((die) => !pod.dies.some((row) => row[0] === die)).map((die) => [die, -1, "lost", -1, -1, -1, -1]);
  [...pod.dies, ...gone].forEach((row, i) => {
    const te = pod.tes[row[1]], per = pod.chips_per_server * pod.dies_per_chip, server = Math.floor(row[0] / per);
    let key = `server ${server}`, label = `server ${server}${server >= pod.superpod_servers ? " (beside the pod)" : ""}`;
    if (arrangement === "role") {
      key = `${row[1]}/${row[2]}/${row[3]}`;
      const role = { both: "", lost: "lost", attention: te?.num_domains > 1 ? `attention, domain ${row[3]}` : "attention", experts: "routed experts", shared: "shared expert", vacant: "vacant" }[row[2]] ?? "";
      label = te && (pod.tes.length > 1 || !role) ? `${te.name}${role && ": "}${role}` : role;
    }
    if (!found.has(key)) found.set(key, { label, dies: [], te: row[1], server });
    found.get(key).dies.push({ row, i });
  });
  return [...found.values()];
}

// In how many columns n dies stand: whole rows, if there is such a number near the wanted shape.
function broad(n, aspect) {
  const about = Math.sqrt(n * aspect);
  if (n <= 8) return n;
  for (let by = 0; by < 0.4 * about; by++) for (const columns of [Math.ceil(about) + by, Math.ceil(about) - by]) if (columns > 0 && n % columns === 0) return columns;
  return Math.ceil(about);
}

function layOut(pod, w, h, c) {
  const all = sections(pod), per = pod.chips_per_server * pod.dies_per_chip;
  const tries = [];
  for (let cell = 62; cell >= 3; cell -= cell > 12 ? 1 : 0.5) for (const aspect of arrangement === "role" ? [1.8, 2.6, 1.2, 4, 6] : [1]) tries.push([cell, aspect]);
  for (const [cell, aspect] of tries) {
    const gap = Math.max(1, cell * 0.14), step = cell + gap, head = 17, margin = cell > 12 ? 16 : 9;
    boxes = []; labels = [];
    let x = 4, y = 4, line = 0, te = null;
    for (const each of all) {
      const columns = arrangement === "server" ? pod.chips_per_server : broad(each.dies.length, aspect);
      const rows = arrangement === "server" ? pod.dies_per_chip : Math.ceil(each.dies.length / columns);
      const narrow = cell < 7 && arrangement === "server";
      const text = narrow ? String(each.server) : `${each.label}${each.dies.length > 1 && arrangement === "role" ? ` × ${each.dies.length}` : ""}`;
      const width = Math.max(columns * step, narrow ? 0 : c.measureText(text).width), height = head + rows * step;
      if (x > 4 && (x + width > w - 4 || (te !== null && te !== each.te && arrangement === "role" && all.length < 12))) { x = 4; y += line + margin; line = 0; }
      te = each.te;
      labels.push({ text, x, y: y + 7 });
      each.dies.forEach(({ row, i }, n) => {
        const where = row[0] % per, column = arrangement === "server" ? Math.floor(where / pod.dies_per_chip) : n % columns, line = arrangement === "server" ? where % pod.dies_per_chip : Math.floor(n / columns);
        boxes.push({ i, row, x: x + column * step, y: y + head + line * step, s: cell });
      });
      x += width + margin; line = Math.max(line, height);
    }
    const bottom = y + line;
    if (bottom <= h && boxes.every((box) => box.x + box.s <= w)) { canvas.style.height = `${Math.max(120, bottom + 6)}px`; break; }
  }
  const known = new Map(boxes.map((box) => [box.row[0], box]));
  for (const [die, box] of known) {
    const old = at.get(die);
    at.set(die, old ? { ...old, to: box } : { x: box.x, y: box.y, s: box.s, load: 0, to: box });
  }
  for (const die of at.keys()) if (!known.has(die)) at.delete(die);
}

// Draws until nothing moves any more; says whether it wants to be called again.
export function tick(now) {
  const flows = arcs && state?.traffic?.pairs.length && !quiet && state.live;
  if (!state || (!moving && !flows)) return;
  const sheet = paper(canvas);
  if (!sheet) return;
  if (timing.last) { timing.frames += 1; timing.worst = Math.max(timing.worst, now - timing.last); } else timing.since = now;
  timing.last = now;
  const { c, w } = sheet, pod = state.pod, most = Math.max(260, Math.min(560, innerHeight * 0.5)), key = `${w} ${most} ${arrangement} ${pod.tes.map((te) => te.name)} ${pod.dies.length} ${state.now.lost}`;
  if (key !== laidFor) { layOut(pod, w, most, c); laidFor = key; return; }
  const lost = new Set(state.now.lost.concat(state.now.lost_servers)), busy = state.load?.busy ?? [];
  moving = false;
  for (const box of boxes) {
    const p = at.get(box.row[0]), want = (busy[box.i] ?? 0) / 1000;
    for (const [name, target] of [["x", box.x], ["y", box.y], ["s", box.s], ["load", want]]) {
      const left = target - p[name];
      if (Math.abs(left) < (name === "load" ? 0.004 : 0.2) || quiet) p[name] = target;
      else { p[name] += left * 0.18; moving = true; }
    }
    c.fillStyle = lost.has(box.row[0]) ? (isDark() ? "#3a1d20" : "#fbdcd9") : colour(hueOf(box.row), p.load);
    if (p.s < 9) c.fillRect(p.x, p.y, p.s, p.s);
    else { c.beginPath(); c.roundRect(p.x, p.y, p.s, p.s, p.s * 0.16); c.fill(); }
    if (lost.has(box.row[0])) {
      c.strokeStyle = ink("bad"); c.lineWidth = Math.max(1, p.s / 14); c.beginPath();
      c.moveTo(p.x + 2, p.y + 2); c.lineTo(p.x + p.s - 2, p.y + p.s - 2); c.moveTo(p.x + p.s - 2, p.y + 2); c.lineTo(p.x + 2, p.y + p.s - 2); c.stroke();
    }
  }
  if (arcs && state.traffic) drawArcs(c, now, flows);
  drawWords(c, lost);
}

// Names of sections and numbers of dies, above the lines; and who is chosen.
function drawWords(c, lost) {
  const dark = isDark(), text = ink("ink");
  c.fillStyle = ink("dim"); c.strokeStyle = ink("card"); c.lineWidth = 4; c.lineJoin = "round";
  for (const label of labels) { c.strokeText(label.text, label.x, label.y); c.fillText(label.text, label.x, label.y); }
  c.strokeStyle = text; c.lineWidth = 2; c.textAlign = "center";
  for (const box of boxes) {
    const p = at.get(box.row[0]);
    if (p.s > 19 && !lost.has(box.row[0])) { c.fillStyle = dark || p.load > 0.55 ? "#fff" : text; c.fillText(box.row[0], p.x + p.s / 2, p.y + p.s / 2 + 0.5); }
    if (box.row[0] === chosen || (document.activeElement === canvas && boxes[focus] === box)) c.strokeRect(p.x - 2, p.y - 2, p.s + 4, p.s + 4);
  }
  c.textAlign = "left";
}

function drawArcs(c, now, flows) {
  const pairs = state.traffic.pairs, most = pairs[0]?.[2] ?? 1, few = pairs.length > 60 ? pairs.slice(0, 60) : pairs;
  for (const [from, to, nbytes, plane] of few) {
    const a = at.get(from), b = at.get(to);
    if (!a || !b) continue;
    const share = Math.sqrt(nbytes / most), ax = a.x + a.s / 2, ay = a.y + a.s / 2, bx = b.x + b.s / 2, by = b.y + b.s / 2;
    const mx = (ax + bx) / 2 - (by - ay) * 0.16, my = (ay + by) / 2 + (bx - ax) * 0.16;
    c.setLineDash(PLANES[plane] ?? []);
    c.strokeStyle = c.fillStyle = solid(hueOf(a.to.row));
    c.globalAlpha = (chosen !== null && chosen !== from && chosen !== to ? 0.05 : 0.12 + 0.33 * share);
    c.lineWidth = 0.6 + 2 * share;
    c.beginPath(); c.moveTo(ax, ay); c.quadraticCurveTo(mx, my, bx, by); c.stroke();
    if (flows) {
      const t = (now / 1400 + ((from * 37 + to * 17) % 100) / 100) % 1, u = 1 - t;
      c.globalAlpha = Math.min(1, c.globalAlpha * 2);
      c.beginPath(); c.arc(u * u * ax + 2 * u * t * mx + t * t * bx, u * u * ay + 2 * u * t * my + t * t * by, 1.2 + 1.8 * share, 0, 7); c.fill();
    }
  }
  c.globalAlpha = 1; c.setLineDash([]);
}

const hit = (x, y) => boxes.find(({ row }) => { const p = at.get(row[0]); return p && x >= p.x - 1 && x <= p.x + p.s + 1 && y >= p.y - 1 && y <= p.y + p.s + 1; });
export function words(row) {
  const i = state.pod.dies.indexOf(row), load = state.load && i >= 0 ? `\nbusy ${(state.load.busy[i] / 10).toFixed(0)} %, waits ${(state.load.waits[i] / 10).toFixed(0)} % of the drawn step` : "";
  return `${row[1] < 0 ? `die ${row[0]}` : nameOf(state.pod, row)}\n${place(state.pod, row[0])}${state.now.lost.includes(row[0]) ? "\nlost" : load}`;
}

export function begin(onChoose) {
  tips(canvas, (x, y) => { const box = hit(x, y); return box ? words(box.row) : ""; });
  canvas.addEventListener("click", (event) => { const box = hit(event.offsetX, event.offsetY); if (box) onChoose(box.row[0]); });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key], here = boxes[focus];
    if (event.key === "Enter" && here) onChoose(here.row[0]);
    if (!move || !here) return;
    event.preventDefault(); event.stopPropagation();
    let best = null;
    boxes.forEach((box, i) => {
      const dx = box.x - here.x, dy = box.y - here.y, along = dx * move[0] + dy * move[1], off = Math.abs(dx * move[1]) + Math.abs(dy * move[0]);
      if (along > 0.5 && (!best || along + 2 * off < best.cost)) best = { i, cost: along + 2 * off };
    });
    if (best) { focus = best.i; moving = true; canvas.setAttribute("aria-label", `Dies: ${words(boxes[focus].row)}`); }
  });
  canvas.addEventListener("focus", () => { moving = true; }); canvas.addEventListener("blur", () => { moving = true; });
  new ResizeObserver(() => { moving = true; }).observe(canvas);
}

export function legend(pod) {
  const seen = new Map();
  for (const row of pod.dies) seen.set(row[2] === "attention" && pod.tes[row[1]].num_domains > 1 ? `attention, domain ${row[3]}` : row[2] === "both" ? "attention and experts" : row[2], hueOf(row));
  $("legend").replaceChildren(...[...seen].map(([name, hue]) => {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = solid(hue); item.append(swatch, name); return item;
  }), "the fuller, the busier its cores in the drawn step; lines: bytes over UB (RoCE dashed, VPC dotted)");
}
export { size, ms };
