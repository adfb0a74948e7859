// What a client's script prints: as in features.py.
import { readFileSync } from "node:fs";

export const BASE_URL = process.env.BASE_URL;
export const MODEL = process.env.MODEL ?? "tiny";

export function version(name) {
  const said = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  console.log(JSON.stringify({ version: `${name} ${said.version}` }));
}

export async function feature(column, name, check) {
  const line = { column, feature: name };
  try {
    const fault = await check();
    if (fault) line.fault = String(fault);
  } catch (error) {
    console.error(error);
    line.failed = String(error).slice(0, 300);
  }
  console.log(JSON.stringify(line));
}

// Why the client has nothing for a column.
export function absent(column, why) {
  console.log(JSON.stringify({ column, feature: "none", absent: why }));
}

export function assert(holds, seen) {
  if (!holds) throw new Error(`found ${JSON.stringify(seen)}`);
}

async function counted(name, label = "") {
  const lines = (await (await fetch(`${BASE_URL}/metrics`)).text()).split("\n");
  const counts = lines.filter((line) => line.startsWith(`vllm:${name}{`) && line.includes(label));
  assert(counts.length > 0, `no count of ${name}`);
  return counts.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

const aborted = () => counted("request_success_total", 'finished_reason="abort"');

async function until(holds, seconds, otherwise) {
  const end = Date.now() + seconds * 1000;
  while (!(await holds())) {
    assert(Date.now() < end, otherwise);
    await new Promise((done) => setTimeout(done, 50));
  }
}

// Abort what a function begins once the server is at work on it: it must end that request within five seconds.
export async function hangingUp(begin) {
  const before = await aborted();
  const controller = new AbortController();
  let came = false;
  const answer = begin(controller.signal).then(() => (came = true), () => {});
  await until(() => counted("num_requests_running"), 30, "the server had no request within 30 s");
  assert(!came, "the answer came before it was cancelled");
  controller.abort();
  await answer;
  await until(async () => (await aborted()) !== before, 5, "the client hung up, and no aborted request was counted");
}

export const PERSON = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 12 },
    age: { type: "integer", minimum: 0, maximum: 120 },
    mood: { enum: ["glad", "sad"] },
  },
  required: ["name", "age", "mood"],
  additionalProperties: false,
};

export function checkPerson(found) {
  const data = typeof found === "string" ? JSON.parse(found) : found;
  assert(["glad", "sad"].includes(data.mood) && data.age >= 0 && data.age <= 120, data);
}
