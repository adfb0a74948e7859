// Vercel's AI SDK, through its providers for OpenAI-compatible endpoints and for OpenAI itself.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";

import { assert, BASE_URL, checkPerson, feature, hangingUp, MODEL, version } from "./features.mjs";

const at = { baseURL: `${BASE_URL}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ ...at, name: "here", supportsStructuredOutputs: true })(MODEL);
const openai = createOpenAI(at);
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120), mood: z.enum(["glad", "sad"]) });
const Story = z.object({ text: z.string().min(4000) }); // takes a few seconds, whatever the model says
const prompt = "Who is glad?";
const models = { compatible, "openai chat": openai.chat(MODEL), "openai responses": openai.responses(MODEL) };

version("ai");

for (const [name, model] of [
  ["compatible", createOpenAICompatible({ ...at, name: "here" }).completionModel(MODEL)],
  ["openai", openai.completion(MODEL)],
]) {
  await feature("text", `${name}: generateText, streamText`, async () => {
    const asked = { model, prompt: "Once upon a time", maxRetries: 0, maxOutputTokens: 16, temperature: 0 };
    const done = await ai.generateText(asked);
    let text = "";
    for await (const part of ai.streamText(asked).textStream) text += part;
    assert(done.text && done.text === text, [done.text, text]);
  });
}

for (const [name, model] of Object.entries(models)) {
  const column = name.endsWith("responses") ? () => "responses" : (own) => own;
  const asked = { model, prompt, maxRetries: 0 };
  await feature(column("chat"), `${name}: generateText`, async () => {
    const done = await ai.generateText({ ...asked, maxOutputTokens: 16 });
    assert(done.text, done);
  });
  await feature(column("stream"), `${name}: streamText`, async () => {
    let text = "";
    for await (const part of ai.streamText({ ...asked, maxOutputTokens: 16 }).textStream) text += part;
    assert(text, text);
  });
  await feature("cancel", `${name}: generateObject, aborted`, () =>
    hangingUp((abortSignal) => ai.generateObject({ ...asked, schema: Story, maxOutputTokens: 1900, abortSignal })),
  );
  await feature(column("structured"), `${name}: generateObject`, async () => {
    if (!ai.generateObject) return "this version has no generateObject";
    checkPerson((await ai.generateObject({ ...asked, schema: Person, maxOutputTokens: 300 })).object);
  });
  await feature(column("structured"), `${name}: streamObject`, async () => {
    if (!ai.streamObject) return "this version has no streamObject";
    const done = ai.streamObject({ ...asked, schema: Person, maxOutputTokens: 300 });
    let parts = 0;
    for await (const part of done.partialObjectStream) parts += Object.keys(part).length > 0;
    checkPerson(await done.object);
    assert(parts > 0, parts);
  });
  await feature(column("tools"), `${name}: tool loop`, async () => {
    const greeted = [];
    const greet = ai.tool({
      description: "Greet somebody.",
      inputSchema: z.object({ mood: z.enum(["glad", "sad"]) }),
      execute: async ({ mood }) => (greeted.push(mood), `a ${mood} day`),
    });
    const done = await ai.generateText({
      ...asked,
      tools: { greet },
      stopWhen: ai.stepCountIs(2),
      maxOutputTokens: 300,
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    assert(greeted.length > 0 && done.steps.length === 2, done.steps);
  });
  await feature(column("tools"), `${name}: streamText, required`, async () => {
    const greet = ai.tool({ inputSchema: z.object({ mood: z.enum(["glad", "sad"]) }) });
    const done = ai.streamText({ ...asked, tools: { greet }, toolChoice: "required", maxOutputTokens: 300 });
    const calls = await done.toolCalls;
    assert(calls.length > 0 && ["glad", "sad"].includes(calls[0].input.mood), calls);
  });
}
