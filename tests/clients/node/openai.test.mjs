import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ADA, CITY, HELLO, Person, apiKey, baseURL, model, user } from "./expected.mjs";

const client = new OpenAI({ apiKey, baseURL, maxRetries: 0 });
const weather = { type: "function", function: { name: "get_weather", parameters: CITY } };

test("chat, whole and by the stream helper", async () => {
  const answer = await client.chat.completions.create({ model, messages: user("hi") });
  assert.equal(answer.choices[0].message.content, HELLO);
  const stream = client.chat.completions.stream({
    model,
    messages: user("hi"),
    stream_options: { include_usage: true },
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, HELLO);
  assert.ok(final.usage.completion_tokens > 0);
});

test("tools in a stream", async () => {
  const messages = user("What is the weather in Paris and Rome?");
  const stream = client.chat.completions.stream({ model, messages, tools: [weather] });
  const final = await stream.finalChatCompletion();
  const calls = final.choices[0].message.tool_calls;
  assert.deepEqual(calls.map((call) => JSON.parse(call.function.arguments).city), ["Paris", "Rome"]);
  assert.equal(final.choices[0].finish_reason, "tool_calls");
});

test("a loop of tools", async () => {
  const run = client.chat.completions.runTools({
    model,
    messages: user("What is the weather in Paris?"),
    tools: [
      {
        type: "function",
        function: { name: "get_weather", parameters: CITY, parse: JSON.parse, function: () => "sunny, 18" },
      },
    ],
  });
  assert.equal(await run.finalContent(), "It is sunny in Paris, with 18 degrees.");
});

test("parse", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const messages = user("Who is Ada?");
  const answer = await client.chat.completions.parse({ model, messages, response_format });
  assert.deepEqual(answer.choices[0].message.parsed, ADA);
});

test("responses, whole and by the stream helper", async () => {
  const answer = await client.responses.create({ model, input: "hi" });
  assert.equal(answer.output_text, HELLO);
  const stream = client.responses.stream({ model, input: "hi" });
  assert.equal((await stream.finalResponse()).output_text, HELLO);
  const parsed = await client.responses.parse({
    model,
    input: "Who is Ada?",
    text: { format: zodTextFormat(Person, "person") },
  });
  assert.deepEqual(parsed.output_parsed, ADA);
});

test("errors", async () => {
  const wrong = { model: "other", messages: user("hi") };
  await assert.rejects(client.chat.completions.create(wrong), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.match(error.message, /does not exist/);
    return error.code === "model_not_found";
  });
  const long = { model, messages: user("word ".repeat(40000)), stream: true };
  await assert.rejects(client.chat.completions.create(long), /maximum context length/);
});
