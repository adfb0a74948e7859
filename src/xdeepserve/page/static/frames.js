// Frames: from the server's stream or from a record. docs/page.md is the format; this page draws version 1.
export const NAME = "xdeepserve-page", VERSION = 1;

export function checkHello(hello) {
  if (hello?.format !== NAME) throw new Error("this is no record of an xdeepserve page");
  if (hello.version !== VERSION)
    throw new Error(`this is format ${hello.version} of the page's data, and this page draws format ${VERSION}: open it with the page of xdeepserve ${hello.software}`);
}

// Reads server-sent events from a fetch, so that a key can go with it: calls on(event, data).
export async function readEvents(response, on) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let event = "message", data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event = line.slice(7);
        if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) on(event, data);
    }
  }
}

export async function errorOf(response) {
  try { return (await response.json()).error.message; } catch { return `the server answers ${response.status}`; }
}

export function keyed(more = {}) {
  const key = sessionStorage.getItem("key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// The stream, for ever: a server that goes away is asked again. `on.hello`, `on.frame`, `on.gone(why)`.
export async function follow(on) {
  for (let pause = 500; ; pause = Math.min(pause * 1.5, 4000)) {
    let why = "the server has gone";
    try {
      const response = await fetch("page/frames", { headers: keyed() });
      if (response.status === 401) {
        const key = prompt("This server wants an API key");
        if (key) sessionStorage.setItem("key", key);
      }
      if (!response.ok) throw new Error(await errorOf(response));
      await readEvents(response, (event, data) => {
        const value = JSON.parse(data);
        if (event === "failed") throw new Error(value.error.message);
        if (event === "hello") { checkHello(value); pause = 500; on.hello(value); }
        if (event === "frame") on.frame(value);
      });
    } catch (error) {
      if (!(error instanceof TypeError)) why = error.message;  // a TypeError is the network's
      if (why.startsWith("this is")) return on.gone(why, false);
    }
    on.gone(why, true);
    await new Promise((done) => setTimeout(done, pause));
  }
}

// What is drawn of each part: numbers, texts, lists, lists of rows, or tables of counts (docs/page.md).
const DRAWN = {
  pod: { model: "", deployment: "", precision: "", runs: "", num_layers: 0, num_experts: 0, servers: 0, superpod_servers: 0, chips_per_server: 0, dies_per_chip: 0, tes: [], dies: [[]] },
  now: { ns: 0, num_running: 0, num_waiting: 0, num_tokens: 0, lives: [], lost: [], lost_servers: [] },
  groups: { used: [], cached: [], running: [], waiting: [], queries: [], hits: [] }, requests: { rows: [[]] }, events: { rows: [[]] },
  step: { te: "", group: 0, step: 0, start_ns: 0, end_ns: 0, lanes: [], names: [], spans: [[]] }, load: { busy: [], waits: [] },
  heat: { unit: "", layers: [], columns: [], values: [[]] }, traffic: { pairs: [[]], num_pairs: 0, nbytes: 0 }, pool: { queries: 0, hits: 0, counts: {}, usage: {} },
};
const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isLike = (value, kind) => Array.isArray(kind) ? Array.isArray(value) && (!kind.length || value.every(Array.isArray)) : isTable(kind) ? isTable(value) : typeof value === typeof kind;
// What is wrong with a frame; nothing if it can be drawn. The first one of a record is whole.
export function wrongIn(frame, isFirst) {
  if (!isTable(frame) || !isTable(frame.parts) || typeof frame.frame !== "number") return "it has no number, or no parts";
  for (const name of isFirst ? ["pod", "now"] : []) if (!(name in frame.parts)) return `the first one has no ${name}`;
  for (const [name, members] of Object.entries(DRAWN)) {
    if (!(name in frame.parts)) continue;
    if (!isTable(frame.parts[name])) return `${name} has nothing in it`;
    for (const [member, kind] of Object.entries(members)) if (!isLike(frame.parts[name][member], kind)) return `${name} has no ${member} of its kind`;
  }
  return "";
}

// A record: a line for what it is, then a line for each frame.
export async function readRecord(file) {
  const lines = (await file.text()).split("\n").filter((line) => line);
  let hello, number = 0;
  try { hello = JSON.parse(lines[0] ?? ""); } catch { throw new Error(`${file.name}: this is no record of an xdeepserve page`); }
  checkHello(hello);
  const frames = [];
  for (const line of lines.slice(1)) {
    number += 1;
    let frame;
    try { frame = JSON.parse(line); } catch {
      if (number < lines.length - 1) throw new Error(`${file.name}: line ${number + 1} is no frame`);
      continue;  // the last line may have been cut
    }
    const wrong = wrongIn(frame, number === 1);
    if (wrong) throw new Error(`${file.name}: line ${number + 1} is no frame: ${wrong}`);
    frames.push(frame);
  }
  if (!frames.length) throw new Error(`${file.name}: the record has no frames`);
  return { hello, frames };
}

// What the page keeps: states, each with all parts, of which most are shared with the state before.
export class History {
  constructor(most = 1200) { this.most = most; this.clear(); }
  clear() { this.states = []; this.dropped = 0; }
  add(frame, isWhole = false) {  // the first one of a stream has all parts that there are
    const before = isWhole ? null : this.states.at(-1);
    const state = { ...(before ?? {}), ...frame.parts, frame: frame.frame, changed: Object.keys(frame.parts) };
    if (!state.pod || !state.now) return;
    this.states.push(state);
    if (this.states.length > this.most) { this.states.shift(); this.dropped += 1; }
  }
  take(other) { Object.assign(this, other); }
  text(hello) {
    const lines = [JSON.stringify(hello)];
    this.states.forEach((state, i) => {
      const { frame, changed, ...all } = state;
      const parts = i ? Object.fromEntries(changed.map((name) => [name, all[name]])) : all;
      lines.push(JSON.stringify({ frame, parts }));
    });
    return lines.join("\n") + "\n";
  }
}
