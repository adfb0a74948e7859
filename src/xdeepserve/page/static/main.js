// The page: frames come in, one of those that are kept is shown, and all drawings are of that one.
import * as chat from "./chat.js";
import { $, el, errorText, ms } from "./draw.js";
import { History, NAME, VERSION, errorOf, follow, keyed, readRecord } from "./frames.js";
import * as map from "./pod_map.js";
import * as panels from "./panels.js";
import * as timeline from "./timeline.js";
import * as token from "./token.js";

const history = new History();
let live = true, paused = false, index = 0, record = null, hello = { format: NAME, version: VERSION, software: "" }, chosen = null, pod = null, shown = null, isFirst = true;

function show(at) {
  const states = history.states;
  if (!states.length) return;
  index = Math.max(0, Math.min(states.length - 1, at));
  const state = { ...states[index], live: live && !record };
  if (state.pod !== pod) {
    pod = state.pod;
    $("who").textContent = `${pod.model}, ${pod.precision}, ${pod.deployment}: ${pod.dies.length} dies ${pod.runs === "lockstep" ? "in lockstep" : pod.runs === "tasks" ? "as tasks" : "in time only"}`;
    if (state.live) chat.setPod(pod);
    map.legend(pod);
  }
  const now = state.now, latest = [...(state.requests?.rows ?? [])].reverse(), first = (column) => latest.find((row) => row[column] >= 0)?.[column];
  for (const [id, text] of [["time", ms(now.ns)], ["ttft", ms(first(4))], ["tpot", ms(first(5))], ["running", now.num_running], ["waiting", now.num_waiting], ["tokens", now.num_tokens]]) if ($(id).textContent !== String(text)) $(id).textContent = text;
  $("scrub").max = states.length - 1; $("scrub").value = index;
  $("scrub").setAttribute("aria-valuetext", `${ms(now.ns)} of virtual time`);
  $("at").textContent = `${index + 1} of ${states.length}, ${ms(now.ns)}`;
  document.body.classList.toggle("stepless", !state.step);  // there is nothing to tell of a step that is to come
  map.setState(state); timeline.setState(state); panels.setState(state); token.setState(state);
  const wasLost = shown?.now.lost.includes(chosen);
  shown = state;
  if (chosen !== null && now.lost.includes(chosen) !== wasLost) drawDie();
}
function pause(on) {
  paused = on;
  $("pause").textContent = on ? record ? "Play" : "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", on);
  if (!on && !record) show(history.states.length - 1);
}
function stepBy(by, wholeSteps) {
  if (!paused) pause(true);
  let at = index + by;
  if (wholeSteps) while (history.states[at] && history.states[at].step === history.states[index].step) at += by;
  show(at);
}
function notice(text, isBad) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
  $("notice").className = isBad ? "bad" : "";
}

follow({
  hello(found) {
    hello = found; live = isFirst = true;
    if (!record) { if (!paused) history.clear(); notice(""); }  // who looks at a moment keeps it
  },
  frame(frame) {
    if (record) return;
    const before = history.dropped;
    history.add(frame, isFirst);
    isFirst = false;
    if (!paused) return show(history.states.length - 1);
    index = Math.max(0, index - (history.dropped - before));  // what is shown has moved, or was the oldest
    $("scrub").max = history.states.length - 1; $("scrub").value = index;
  },
  gone(why, again) {
    live = false;
    if (!record) { notice(`${why}${again ? ": asking again" : ""}`, true); if (shown) show(index); }
  },
});

async function openRecord(file) {
  try {
    const found = await readRecord(file);
    const kept = new History(Infinity);
    found.frames.forEach((frame) => kept.add(frame));
    history.take(kept); record = file.name; hello = found.hello;  // all is well: what was shown may go
    notice(`A record: ${file.name}, ${history.states.length} frames. Reload the page for the server.`);
    closeDie(); pause(true); show(0);
  } catch (error) { notice(error.message, true); }
}
setInterval(() => { if (record && !paused) { if (index + 1 < history.states.length) show(index + 1); else pause(true); } }, 100);

// ---- a die ------------------------------------------------------------------------------------------
function choose(die) {
  chosen = die; map.choose(die); token.followFrom(die); drawDie();
  $("die").hidden = false;
  $("die").scrollIntoView({ block: "nearest" });
}
function closeDie() { $("die").hidden = true; chosen = null; map.choose(null); }
function drawDie() {
  if (!shown) return;
  const row = shown.pod.dies.find((each) => each[0] === chosen) ?? [chosen, -1, "lost", -1, -1, -1, -1];
  const isLost = shown.now.lost.includes(chosen);
  $("die-title").textContent = `Die ${chosen}${isLost ? ", lost" : ""}`;
  const bytes = el("div", { className: "bytes" }), why = el("p", { className: "none", role: "status" }), keys = el("div", { className: "keys" });
  const buttons = (shown.pod.breaks ?? []).map(([kind, text, title]) => {
    const button = el("button", { className: "danger", textContent: text, title, disabled: !shown.live || isLost || shown.pod.no_kill !== null });
    button.dataset.kind = kind;
    button.addEventListener("click", () => breakDie(chosen, kind, why));
    return button;
  });
  keys.append(...buttons);
  why.textContent = shown.live ? shown.pod.no_kill ?? "" : "Dies of a record cannot be broken.";
  $("die-body").replaceChildren(...map.words(row).split("\n").map((line) => el("p", { textContent: line })), keys, why, el("h2", { textContent: "Its memory" }), bytes);
  if (isLost) bytes.textContent = "It does not answer."; else listRegions(chosen, bytes);
}
async function breakDie(die, kind, why) {
  const response = await fetch("page/break", { method: "POST", headers: keyed({ "Content-Type": "application/json" }), body: JSON.stringify({ die, kind }) }).catch(() => null);
  why.textContent = !response ? "the server has gone" : !response.ok ? await errorOf(response) : `It happens at ${ms((await response.json()).at_ns)} of virtual time${chat.isRunning() ? "" : ", which goes on with the next prompt"}.`;
}
async function listRegions(die, box) {
  try {
    const found = await token.bytesOf(die), list = el("table");
    for (const [area, name, offset, nbytes] of found.regions) {
      const button = el("button", { textContent: name });
      button.addEventListener("click", async () => {
        try { box.replaceChildren(token.regionBox(await token.bytesOf(die, name)), back); } catch (error) { box.replaceChildren(errorText(error), back); }
      });
      list.append(el("tr", {}, el("td", {}, button), el("td", { textContent: area }), el("td", { textContent: nbytes })));
    }
    const back = el("button", { textContent: "all regions" }), all = el("div", { className: "regions", tabIndex: 0 }, list);
    back.addEventListener("click", () => box.replaceChildren(all));
    box.replaceChildren(all);
  } catch (error) { box.textContent = errorText(error); }
}

// ---- keys and buttons -------------------------------------------------------------------------------
function dark(on) {
  document.documentElement.classList.toggle("dark", on);
  map.redraw(); timeline.redraw(); panels.redraw();
}
const prefers = matchMedia("(prefers-color-scheme: dark)");
dark(localStorage.getItem("dark") === null ? prefers.matches : localStorage.getItem("dark") === "1");
prefers.addEventListener("change", (event) => { if (localStorage.getItem("dark") === null) dark(event.matches); });
const turnDark = () => { const on = !document.documentElement.classList.contains("dark"); localStorage.setItem("dark", on ? "1" : "0"); dark(on); };
const toggle = (id, on) => { $(id).setAttribute("aria-pressed", on); return on; };
const arrange = (how) => { map.arrange(how); toggle("by-role", how === "role"); toggle("by-server", how === "server"); };

function save() {
  const link = el("a", { href: URL.createObjectURL(new Blob([history.text(hello)])), download: "xdeepserve.jsonl" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
const on = (id, act) => $(id).addEventListener("click", act);
on("pause", () => { if (record && paused && index === history.states.length - 1) show(0); pause(!paused); });
on("back", (event) => stepBy(-1, event.shiftKey)); on("forth", (event) => stepBy(1, event.shiftKey));
on("dark", turnDark); on("die-close", closeDie); on("save", save); on("whole", timeline.whole);
on("by-role", () => arrange("role")); on("by-server", () => arrange("server"));
on("arcs", () => map.showArcs(toggle("arcs", $("arcs").getAttribute("aria-pressed") !== "true")));
on("engines", () => timeline.showEngines(toggle("engines", $("engines").getAttribute("aria-pressed") !== "true")));
$("scrub").addEventListener("input", (event) => { if (!paused) pause(true); show(+event.target.value); });
$("open").addEventListener("change", (event) => { if (event.target.files[0]) openRecord(event.target.files[0]); event.target.value = ""; });
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) openRecord(event.dataTransfer.files[0]); });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "range") return;
  const act = { " ": () => pause(!paused), ArrowLeft: () => stepBy(-1, event.shiftKey), ArrowRight: () => stepBy(1, event.shiftKey), d: turnDark, m: () => arrange($("by-role").getAttribute("aria-pressed") === "true" ? "server" : "role"), t: () => $("arcs").click(), o: () => $("open").click(), p: () => $("prompt").focus(), Escape: closeDie }[event.key];
  if (!act || (event.key === " " && event.target.tagName === "BUTTON")) return;
  event.preventDefault(); act();
});

map.begin(choose); timeline.begin((span) => choose(span[0])); panels.begin(); token.begin(); chat.begin(); token.draw();
function tick(now) { requestAnimationFrame(tick); map.tick(now); timeline.tick(); panels.tick(); }
requestAnimationFrame(tick);
globalThis.xdeepserve = { history, map, get shown() { return shown; } };  // for who looks from the console
