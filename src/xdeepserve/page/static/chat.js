// Prompts to the served model, answers as they come, and the sha256 of each answer's token ids (int32, little endian):
// the same prompt has the same digest whatever happens to the pod.
import { $, el } from "./draw.js";
import { errorOf, keyed, readEvents } from "./frames.js";

const IDEAS = ["Tell me a story about a fox called Mia.", "What is 47 + 49?", "Write a function scale(x) that returns x times 14."];
const digests = new Map();  // by prompt and number of tokens: the first answer's
let pod = null, running = 0;

export function sha256(bytes) {
  const k = [], primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
  const frac = (x) => Math.floor((x - Math.floor(x)) * 2 ** 32) | 0, h = primes.slice(0, 8).map((p) => frac(Math.sqrt(p)));
  for (const p of primes) k.push(frac(Math.cbrt(p)));
  const padded = new Uint8Array((bytes.length + 72) & ~63), view = new DataView(padded.buffer), w = new Int32Array(64), turn = (x, n) => (x >>> n) | (x << (32 - n));
  padded.set(bytes); padded[bytes.length] = 128; view.setUint32(padded.length - 4, bytes.length * 8);
  for (let at = 0; at < padded.length; at += 64) {
    for (let i = 0; i < 16; i++) w[i] = view.getInt32(at + 4 * i);
    for (let i = 16; i < 64; i++) w[i] = w[i - 16] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ (w[i - 15] >>> 3)) + w[i - 7] + (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ (w[i - 2] >>> 10));
    let [a, b, c, d, e, f, g, last] = h;
    for (let i = 0; i < 64; i++) {
      const one = (last + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i]) | 0, two = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      last = g; g = f; f = e; e = (d + one) | 0; d = c; c = b; b = a; a = (one + two) | 0;
    }
    [a, b, c, d, e, f, g, last].forEach((value, i) => { h[i] = (h[i] + value) | 0; });
  }
  return h.map((word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
}
const digestOf = (ids) => sha256(new Uint8Array(Int32Array.from(ids).buffer));

export function setPod(next) {
  if (pod?.model === next.model && pod.has_text === next.has_text) return;
  pod = next;
  if (!pod.has_text) { $("prompt").placeholder = "This model has no tokenizer: token ids, as in 5 6 7"; $("prompt").value ||= "5 6 7"; }
  $("many").hidden = !pod.has_text;
  $("ideas").replaceChildren(...(pod.has_text ? IDEAS : []).map((text) => { const idea = el("button", { type: "button", textContent: text }); idea.addEventListener("click", () => ask(text)); return idea; }));
}

function bodyOf(text, most, n) {
  const shared = { stream: true, temperature: 0, max_tokens: most, return_token_ids: true };
  if (pod?.has_text ?? true) return ["v1/chat/completions", { ...shared, n, messages: [{ role: "user", content: text }] }];
  const ids = text.split(/[\s,]+/).filter((each) => each).map(Number);
  return ["v1/completions", { ...shared, prompt: ids, ignore_eos: true }];
}

// `n` choices are one request: browsers hold back the seventh of several to one server.
export async function ask(text, n = 1, most = +$("most").value || 160) {
  const told = el("div", { className: "told" }), digest = el("div", { className: "digest", textContent: "…" }), answer = el("div", { className: "answer" }, el("div", { className: "asked", textContent: text }), told, digest), all = Array.from({ length: n }, () => []);
  let isWhole = true;
  $("answers").append(answer);
  while ($("answers").children.length > 12) $("answers").firstChild.remove();
  $("answers").scrollTop = $("answers").scrollHeight;
  running += 1;
  try {
    const [path, body] = bodyOf(text, most, n), response = await fetch(path, { method: "POST", headers: keyed({ "Content-Type": "application/json" }), body: JSON.stringify(body) });
    if (!response.ok) throw new Error(await errorOf(response));
    await readEvents(response, (_, data) => {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (!choice) return;
      isWhole &&= choice.finish_reason !== "abort";
      const part = choice.delta?.content ?? choice.text ?? "", found = choice.token_ids ?? [];
      all[choice.index].push(...found);
      const words = part || (pod && !pod.has_text && found.length ? `${found.join(" ")} ` : "");
      if (words && !choice.index) told.append(el("span", { textContent: words, title: found.length ? `token ${found.join(", ")}` : "" }));
      digest.textContent = `${counted(all)} …`;
      $("answers").scrollTop = $("answers").scrollHeight;
    });
    if (!isWhole) throw new Error(`aborted after ${counted(all)}: the server ends`);
    finish(digest, text, most, all);
  } catch (error) {
    digest.replaceChildren(el("span", { className: "other", textContent: error instanceof TypeError ? "the server has gone before the answer's end" : error.message }), againButton(text, n, most));
  }
  running -= 1;
}
const counted = (all) => `${all.length > 1 ? `${all.length} choices, ` : ""}${all.reduce((sum, ids) => sum + ids.length, 0)} tokens`;
function againButton(text, n, most) {
  const again = el("button", { type: "button", textContent: "again" });
  again.addEventListener("click", () => ask(text, n, most));
  return again;
}
function finish(digest, text, most, all) {
  const [found, ...others] = all.map(digestOf), differs = others.some((other) => other !== found), key = `${most} ${text}`, before = digests.get(key);
  if (!before) digests.set(key, found);
  const same = [others.length ? "all the same bits" : "", before ? "same bits as before" : ""].filter((each) => each).join(", ");
  const verdict = differs ? "choices DIFFER" : before && before !== found ? "DIFFERENT from before" : "";
  const told = verdict ? el("span", { className: "other", textContent: verdict }) : same ? el("span", { className: "same", textContent: same }) : "";
  digest.replaceChildren(counted(all), el("code", { textContent: `sha256:${found.slice(0, 16)}…`, title: `sha256:${found} of the token ids${others.length ? " of the first" : ""}` }), told, againButton(text, all.length, most));
  $("answers").scrollTop = $("answers").scrollHeight;
}
export const isRunning = () => running > 0;
export function begin() {
  $("many").addEventListener("click", () => ask($("prompt").value.trim() || IDEAS[0], 16));
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); const text = $("prompt").value.trim(); if (text) { $("prompt").value = pod && !pod.has_text ? text : ""; ask(text); } });
  $("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); } });
}
