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

async function aborted() {
  const lines = (await (await fetch(`${BASE_URL}/metrics`)).text()).split("\n");
  const counts = lines.filter((line) => /^vllm:request_success_total\{.*finished_reason="abort"/.test(line));
  assert(counts.length > 0, "no count of aborted requests");
  return counts.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

// Abort what a function begins, half a second later: the server must end that request within five seconds.
export async function hangingUp(begin) {
  const before = await aborted();
  const controller = new AbortController();
  setTimeout(() => controller.abort(), 500);
  await begin(controller.signal).catch(() => {});
  assert(controller.signal.aborted, "the answer came before it was cancelled");
  const end = Date.now() + 5000;
  while ((await aborted()) === before) {
    assert(Date.now() < end, "the client hung up, and the server counted no aborted request");
    await new Promise((done) => setTimeout(done, 50));
  }
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
