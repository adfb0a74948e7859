// A token's way through a layer with experts, from the spans of the drawn step: who has it, in which step of the
// protocol, for how long; and, on a click, the fields and rows that lie in the dies' memories.
import { $, el, errorText, hueOf, ms, nameOf, size, solid } from "./draw.js";
import { errorOf, keyed } from "./frames.js";

const WHY = {
  MLAProlog: "projects the hidden state to queries and to the latent that the KV cache keeps", MLA: "attends over the latents of all positions before", OProj: "projects what the heads have found back to the hidden size",
  Residual: "adds it to what came in", Norm: "normalises the rows", Gate: "scores the experts and picks the top ones of the best groups", Experts: "its rows go through the experts of this die, grouped: one INT8 GEMM for each expert", SharedExpert: "the expert that every token takes", MLP: "the dense feed-forward of a layer without experts",
};
const STEP = { 1: "loads the tokens into the unified buffer", 2: "converts them for the way", 3: "writes the rows where the reader will find them", 4: "posts a field for the reader: event, pointer, count", 5: "polls until the fields of all that it waits for have this event", "6-7": "pulls the rows: MTE2 in, MTE3 out", 8: "puts them into the order of the kernel" };
const LEG = { A2E: "attention die to its trampoline: every token once", "A2E'": "trampolines to expert dies: a copy for each chosen expert", E2A: "experts' answers back to the trampolines", "E2A'": "the trampoline's weighted sum back to the attention die", dispatch: "tokens to the dies that have their experts", combine: "answers back to the tokens' dies" };
const REGION = { A2E: "tokens", "A2E'": "experts.dispatch", E2A: "experts.combine", "E2A'": "answers", dispatch: "dispatch", combine: "combine" };
const LANES = new Set(["AIC", "AIV", "XCCL", "XCCL microbatch 0", "XCCL microbatch 1", "A2E receive", "E2A send", "A2E receive: steps", "E2A send: steps", "trampoline"]);
let state, from = null, layer = null, micro = null, shown = "", open = null;

export function setState(next) { state = next; draw(); }
export function followFrom(die) { from = die; open = null; draw(true); }

// The die whose token is followed, its trampoline, and the expert die that has most to do with it.
function cast(spans) {
  const { step, pod } = state, rows = new Map(pod.dies.map((row) => [row[0], row])), te = pod.tes.findIndex((each) => each.name === step.te);
  const mine = pod.dies.filter((row) => row[1] === te && row[4] >= 0), has = new Set(spans.filter((span) => step.names[span[2]] === "MLAProlog").map((span) => span[0]));
  const first = has.has(from) ? from : mine.find((row) => row[4] === step.group && has.has(row[0]))?.[0] ?? mine.find((row) => has.has(row[0]))?.[0];
  if (first === undefined) return null;
  const experts = pod.dies.filter((row) => row[1] === te && (row[2] === "experts" || row[2] === "shared")), home = rows.get(first);
  if (!experts.length) return { first, home, others: [] };
  const sameDomain = mine.filter((row) => row[3] === home[3]), trampoline = experts[sameDomain.findIndex((row) => row[0] === first) % experts.length][0];
  return { first, home, trampoline, others: experts.map((row) => row[0]) };
}

function way() {
  const { step } = state, spans = step.spans.filter((span) => LANES.has(step.lanes[span[1]])), people = cast(spans);
  if (!people) return null;
  const own = spans.filter((span) => span[0] === people.first), layers = [...new Set(own.filter((span) => step.names[span[2]] === "Gate").map((span) => span[5]))];
  if (!layers.length) return null;
  const micros = [...new Set(own.filter((span) => step.names[span[2]] === "Gate").map((span) => span[6]))];
  const l = layers.includes(layer) ? layer : layers[0], m = micros.includes(micro) ? micro : micros[0], domain = people.others.length ? people.home[3] : -1;
  const here = spans.filter((span) => span[5] === l && (span[6] === m || span[6] < 0) && (span[7] === domain || span[7] < 0 || domain < 0));
  const busy = new Map();
  for (const span of here) if (step.names[span[2]] === "Experts" && span[0] !== people.first && (people.others.length ? people.others.includes(span[0]) : true)) busy.set(span[0], (busy.get(span[0]) ?? 0) + span[4]);
  const away = [...busy].sort((a, b) => (a[0] === people.trampoline) - (b[0] === people.trampoline) || b[1] - a[1])[0]?.[0];
  const dies = new Set([people.first, people.trampoline, away].filter((die) => die !== undefined));
  const parts = (span) => [span[0] === people.first && "first", span[0] === people.trampoline && "trampoline", span[0] === away && "away"].filter((part) => part);
  const isKernel = (span) => ["AIC", "AIV"].includes(step.lanes[span[1]]), posted = new Set(here.filter((span) => !isKernel(span)).map((span) => `${span[0]} ${step.names[span[2]]}`));
  const twice = (span) => { const known = parse(step.names[span[2]]); return known && isKernel(span) && posted.has(`${span[0]} ${known.leg} ${known.step}`); };
  const stops = here.filter((span) => dies.has(span[0]) && parts(span).some((part) => TAKES[part](parse(step.names[span[2]]), step.names[span[2]])) && !twice(span) && !["A2E receive", "E2A send"].some((lane) => step.lanes[span[1]] === lane && step.lanes.includes(`${lane}: steps`))).sort((a, b) => a[3] + a[4] - b[3] - b[4] || a[3] - b[3]);  // a wait belongs where it ends
  return { ...people, away, layers, micros, l, m, domain, stops };
}

// Which steps of the protocol each of them takes for this token, and which kernels.
const sends = (known) => !known.step || parseInt(known.step) < 5, takes = (known) => !known.step || parseInt(known.step) >= 5;
const TAKES = {
  first: (known, name) => known ? (["A2E", "dispatch"].includes(known.leg) && sends(known)) || (["E2A'", "combine"].includes(known.leg) && takes(known)) : name !== "Experts",
  trampoline: (known) => !!known && ((["A2E", "E2A"].includes(known.leg) && takes(known)) || (["A2E'", "E2A'"].includes(known.leg) && sends(known))),
  away: (known, name) => known ? (["A2E'", "dispatch"].includes(known.leg) && takes(known)) || (["E2A", "combine"].includes(known.leg) && sends(known)) : name === "Experts" || name.startsWith("domain"),
};
function parse(name) {
  const found = /^(A2E'|A2E|E2A'|E2A|dispatch|combine)(?: ([\d-]+))?/.exec(name);
  return found ? { leg: found[1], step: found[2] } : null;
}
function why(name) {
  const found = parse(name);
  return found ? found.step ? `${STEP[found.step] ?? ""}` : LEG[found.leg] : WHY[name] ?? "";
}

export function draw(force) {
  if (!state?.step) { $("token-way").replaceChildren(el("p", { className: "none", textContent: "A step is drawn as soon as the model computes: send a prompt." })); return; }
  const key = `${state.step.te} ${state.step.step} ${from} ${layer} ${micro}`;
  if ((key === shown || open) && !force) return;
  shown = key;
  const found = way();
  if (!found) { if (!$("token-way").children.length) $("token-way").replaceChildren(el("p", { className: "none", textContent: "The drawn step has no layer with experts on the dies that are shown." })); return; }
  fill($("token-layer"), found.layers, found.l); fill($("token-mb"), found.micros.map((m) => Math.max(0, m)), Math.max(0, found.m));
  $("token-name").textContent = `from die ${found.first}${found.trampoline !== undefined ? ` by trampoline ${found.trampoline}` : ""}${found.away !== undefined ? ` to experts on ${found.away}` : ""} and back`;
  let leg = "", number = 0;
  const places = [...new Set([found.first, found.trampoline, found.away])].filter((die) => die !== undefined), say = (die) => `die ${die}${die === found.first ? "" : die === found.trampoline ? ", the trampoline" : ", with experts that were chosen"}`;
  const nodes = places.map((die, i) => el("div", { className: `way-die c${i}`, textContent: say(die) })), rows = new Map(state.pod.dies.map((row) => [row[0], row])), gate = found.stops.find((span) => state.step.names[span[2]] === "MLAProlog")?.[3] ?? 0;
  for (const span of found.stops) {
    const told = state.step.names[span[2]], name = told.startsWith("domain") ? state.step.lanes[span[1]] : told, known = parse(name);
    if (known && known.leg !== leg) nodes.push(el("div", { className: "way-head", textContent: `${known.leg}: ${LEG[known.leg]}` }));
    leg = known?.leg ?? leg;
    number += 1;
    const row = rows.get(span[0]), stop = el("button", { className: "stop" }, el("span", { className: "no", textContent: number }), el("b", { textContent: name }), el("span", { className: "ns", textContent: `+${ms(span[3] - gate)}, ${span[8] ? "waits " : ""}${ms(span[4])}` }), el("span", { className: "why", textContent: `${why(name)}${span[9] >= 0 ? `, ${size(span[9])}` : ""}` }));
    stop.style.borderLeftColor = solid(hueOf(row));
    stop.classList.add(`c${places.indexOf(span[0])}`);
    stop.setAttribute("aria-expanded", "false");
    stop.addEventListener("click", () => show(stop, span, name, found));
    nodes.push(stop);
  }
  $("token-way").replaceChildren(...nodes);
  $("token-way").dataset.places = places.length;
}
function fill(select, values, value) {
  if ([...select.options].map((each) => each.value).join() !== values.join()) select.replaceChildren(...values.map((each) => el("option", { value: each, textContent: each })));
  select.value = value;
}

// Which die's regions a step of the protocol reads or writes.
function regionsOf(name, span, found, names) {
  const known = parse(name);
  if (!known) return [];
  const kinds = { 1: ["blocks"], 2: ["blocks"], 3: ["blocks"], 4: ["blocks"], 5: ["fields"], "6-7": ["rows", "fields"], 8: ["rows"] }[known.step] ?? ["fields", "rows", "blocks"];
  return kinds.flatMap((kind) => names.filter((each) => each.endsWith(`${REGION[known.leg]}.${kind}`) && (!/mb\d/.test(each) || found.m < 0 || each.includes(`mb${found.m}`)) && (!/domain\d/.test(each) || found.domain < 0 || each.includes(`domain${found.domain}`))));
}
async function show(stop, span, name, found) {
  const next = stop.nextElementSibling, was = next?.className === "bytes";
  document.querySelectorAll("#token-way .bytes").forEach((each) => each.remove());
  document.querySelectorAll("#token-way .stop").forEach((each) => each.setAttribute("aria-expanded", "false"));
  open = was ? null : stop;
  if (was) return;
  stop.setAttribute("aria-expanded", "true");
  const box = el("div", { className: "bytes" }, "…");
  stop.after(box);
  try {
    const of = await bytesOf(span[0]), names = of.regions.map((each) => each[1]), wanted = regionsOf(name, span, found, names);
    if (!wanted.length) { box.replaceChildren(el("div", { textContent: parse(name) ? `Die ${span[0]} has no region of this exchange: it only reads its peers'.` : `A kernel of die ${span[0]}: it reads and writes the die's own memory. Click the die for all its regions.` })); return; }
    box.replaceChildren(...(await Promise.all(wanted.slice(0, 2).map((region) => bytesOf(span[0], region)))).map(regionBox));
  } catch (error) { box.textContent = errorText(error); }
}

export async function bytesOf(die, region) {
  if (!state.live) throw new Error("a record has no memories: bytes are there while a server runs");
  const response = await fetch(`page/bytes?die=${die}${region ? `&region=${encodeURIComponent(region)}` : ""}`, { headers: keyed() });
  if (!response.ok) throw new Error(await errorOf(response));
  return response.json();
}
export function regionBox(found) {
  const [area, name, offset, nbytes] = found.region, lines = found.hex.match(/.{1,32}/g) ?? [];
  const dump = lines.slice(0, 12).map((line, i) => `${(offset + 16 * i).toString(16).padStart(8, "0")}  ${line.match(/../g).join(" ")}`).join("\n");
  const box = el("div", {}, el("b", { textContent: name }), ` in the ${area} area of die ${found.die} at ${offset}, ${size(nbytes)}${found.axes ? `: ${found.axes}, ${found.item_nbytes} bytes each` : ""}; as it is now`);
  if (found.members.length) {
    const cells = found.members[0][3].length, table = el("table", {}, el("tr", {}, ...["byte", "member", "type", ...Array.from({ length: cells }, (_, i) => `[${i}]`)].map((text) => el("th", { textContent: text }))));
    for (const [member, type, at, values] of found.members) table.append(el("tr", {}, ...[at, member, type, ...values].map((text) => el("td", { textContent: text }))));
    box.append(table);
  }
  box.append(el("pre", { textContent: dump || "(empty)", tabIndex: 0 }));
  return box;
}
export function begin() {
  $("token-layer").addEventListener("change", (event) => { layer = +event.target.value; open = null; draw(true); });
  $("token-mb").addEventListener("change", (event) => { micro = +event.target.value; open = null; draw(true); });
}
export { nameOf };
