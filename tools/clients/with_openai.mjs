// OpenAI's own client for JavaScript.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { assert, BASE_URL, checkPerson, feature, hangingUp, MODEL, PERSON, version } from "./features.mjs";

const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Who is glad?" }];
const asked = { model: MODEL, messages };
const tool = { type: "function", function: { name: "greet", parameters: PERSON, strict: true } };
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120), mood: z.enum(["glad", "sad"]) });

version("openai");

await feature("text", "completion", async () => {
  const done = await client.completions.create({ model: MODEL, prompt: "Once", max_tokens: 8 });
  assert(done.choices[0].text, done);
});
await feature("chat", "answer", async () => {
  const done = await client.chat.completions.create({ ...asked, max_tokens: 16 });
  assert(done.choices[0].message.content, done);
});
await feature("chat", "errors", async () => {
  try {
    await client.chat.completions.create({ ...asked, model: "another" });
  } catch (error) {
    return assert(error instanceof OpenAI.NotFoundError, String(error));
  }
  assert(false, "an answer");
});
await feature("stream", "chat", async () => {
  const stream = await client.chat.completions.create({ ...asked, max_tokens: 16, stream: true });
  let chunks = 0;
  for await (const chunk of stream) chunks += chunk.choices.length;
  assert(chunks > 2, chunks);
});
for (const stream of [false, true]) {
  await feature("cancel", stream ? "stream, aborted" : "answer, aborted", () =>
    hangingUp(async (signal) => {
      const body = { ...asked, max_tokens: 1900, ignore_eos: true, stream };
      const done = await client.chat.completions.create(body, { signal });
      if (stream) for await (const _ of done);
    }),
  );
}
await feature("stream", "accumulated", async () => {
  const done = await client.chat.completions.stream({ ...asked, max_tokens: 16 }).finalChatCompletion();
  assert(done.choices[0].message.content, done);
});
await feature("structured", "parse", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const done = await client.chat.completions.parse({ ...asked, max_tokens: 300, response_format });
  checkPerson(done.choices[0].message.parsed);
});
await feature("tools", "required", async () => {
  const choice = { tools: [tool], tool_choice: "required", parallel_tool_calls: false };
  const done = await client.chat.completions.create({ ...asked, ...choice });
  checkPerson(done.choices[0].message.tool_calls[0].function.arguments);
});
await feature("responses", "answer", async () => {
  const done = await client.responses.create({ model: MODEL, input: "Who is glad?", max_output_tokens: 16 });
  assert(done.output_text, done);
});
await feature("responses", "streamed", async () => {
  const wanted = { model: MODEL, input: "Who is glad?", max_output_tokens: 16, stream: true };
  const kinds = [];
  for await (const event of await client.responses.create(wanted)) kinds.push(event.type);
  assert(kinds[0] === "response.created", kinds);
});
