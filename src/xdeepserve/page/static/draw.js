// What all drawings share: colours, sizes of canvases, the tip, words for numbers.
export const $ = (id) => document.getElementById(id);
const hues = { both: [173, 60], prefill: [262, 60], decode: [217, 75], experts: [33, 88], shared: [338, 70], vacant: [210, 6] };
const domains = [[217, 80], [192, 80], [160, 62], [239, 62]];
export const isDark = () => document.documentElement.classList.contains("dark");
export const hueOf = (row) => row[2] === "attention" ? domains[row[3] % domains.length] : hues[row[2]] ?? [210, 10];

// A die's colour: pale at rest, full when its cores are busy all the time.
export function colour([hue, full], load) {
  const light = isDark() ? 22 + 38 * load : 88 - 40 * load;
  return `hsl(${hue} ${Math.round(full * (0.7 + 0.3 * load))}% ${light}%)`;
}
export const solid = ([hue, full], light = isDark() ? 62 : 46) => `hsl(${hue} ${full}% ${light}%)`;
export const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
export const MICRO = ["hsl(217 75% 55%)", "hsl(28 90% 55%)", "hsl(110 45% 45%)", "hsl(310 45% 55%)"];

// A canvas in CSS pixels; null while it is not shown.
export function paper(canvas, height) {
  const ratio = devicePixelRatio || 1;
  if (height) canvas.style.height = `${height}px`;
  const w = canvas.clientWidth, h = canvas.clientHeight;
  if (!w || !h) return null;
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
    canvas.width = Math.round(w * ratio);
    canvas.height = Math.round(h * ratio);
  }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, w, h);
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  return { c, w, h };
}

export function el(name, props = {}, ...children) {
  const node = Object.assign(document.createElement(name), props);
  node.append(...children);
  return node;
}

export function ms(ns) {
  if (ns == null || ns < 0) return "–";
  if (ns < 1e3) return `${ns} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toFixed(1)} µs`;
  return ns < 1e9 ? `${(ns / 1e6).toFixed(2)} ms` : `${(ns / 1e9).toFixed(3)} s`;
}
export function size(n) {
  return n < 1024 ? `${n} B` : n < 1048576 ? `${(n / 1024).toFixed(1)} KiB` : `${(n / 1048576).toFixed(1)} MiB`;
}

export function tip(text, event) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4))}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
}
export function tips(canvas, find) {
  canvas.addEventListener("pointermove", (event) => tip(find(event.offsetX, event.offsetY), event));
  canvas.addEventListener("pointerleave", () => tip(""));
}

// Names of dies: what they are to their TE, and where they stand.
export function nameOf(pod, row) {
  const te = pod.tes[row[1]], many = pod.tes.length > 1 ? `${te.name}, ` : "";
  const held = row[5] < 0 || !["experts", "both", "prefill"].includes(row[2]) ? "" : row[5] === row[6] ? `, expert ${row[5]}` : `, experts ${row[5]}–${row[6]}`;
  const what = { both: `DP group ${row[4]}`, prefill: `DP group ${row[4]}`, decode: `DP group ${row[4]}`, attention: te.num_domains > 1 ? `attention, domain ${row[3]}, DP group ${row[4]}` : `attention, DP group ${row[4]}`, experts: "experts", shared: "shared expert", vacant: "vacant seat" }[row[2]];
  return `die ${row[0]}: ${many}${what}${held.replace(/^, experts?/, row[2] === "experts" ? "" : "$&")}`;
}
export function place(pod, die) {
  const per = pod.chips_per_server * pod.dies_per_chip, server = Math.floor(die / per), rest = die % per;
  return `server ${server}, chip ${Math.floor(rest / pod.dies_per_chip)}, die ${rest % pod.dies_per_chip}`;
}
export const errorText = (error) => error instanceof TypeError ? "the server has gone" : error.message;
