import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ChatOpenAI } from "@langchain/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import test from "node:test";
import { ADA, City, HELLO, Person, address, apiKey, baseURL, model, user } from "./expected.mjs";

const provider = createOpenAICompatible({
  name: "lmdeploy",
  apiKey,
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const ai = { model: provider(model), maxRetries: 0 };

test("AI SDK: text and reasoning in a stream", async () => {
  const failed = [];
  const result = streamText({
    ...ai,
    prompt: "What is two and two?",
    onError: ({ error }) => failed.push(error),
  });
  await result.consumeStream();
  assert.deepEqual(failed, []);
  assert.equal((await result.text).trim(), "Four.");
  assert.equal((await result.reasoningText).trim(), "Two and two are four.");
  assert.equal(await result.finishReason, "stop");
  assert.ok((await result.usage).outputTokens > 0);
});

test("AI SDK: a loop of tools", async () => {
  const tools = { get_weather: tool({ inputSchema: City, execute: () => "sunny, 18" }) };
  const prompt = "What is the weather in Paris?";
  const result = await generateText({ ...ai, prompt, tools, stopWhen: stepCountIs(3) });
  assert.equal(result.text, "It is sunny in Paris, with 18 degrees.");
  const stream = streamText({ ...ai, prompt, tools, stopWhen: stepCountIs(3) });
  assert.equal(await stream.text, "It is sunny in Paris, with 18 degrees.");
});

test("AI SDK: objects", async () => {
  const { object } = await generateObject({ ...ai, schema: Person, prompt: "Who is Ada?" });
  assert.deepEqual(object, ADA);
});

test("langchain", async () => {
  const llm = new ChatOpenAI({ model, apiKey, maxRetries: 0, configuration: { baseURL } });
  assert.equal((await llm.invoke("hi")).text, HELLO);
  let text = "";
  for await (const chunk of await llm.stream("hi")) text += chunk.text;
  assert.equal(text, HELLO);
  assert.deepEqual(await llm.withStructuredOutput(Person).invoke("Who is Ada?"), ADA);
});

test("Anthropic: a stream, and an error", async () => {
  const client = new Anthropic({ apiKey, baseURL: address, maxRetries: 0 });
  const stream = client.messages.stream({ model, max_tokens: 100, messages: user("hi") });
  const final = await stream.finalMessage();
  assert.equal(final.content[0].text, HELLO);
  assert.equal(final.stop_reason, "end_turn");
  const wrong = { model: "other", max_tokens: 9, messages: user("hi") };
  await assert.rejects(client.messages.create(wrong), Anthropic.NotFoundError);
});
