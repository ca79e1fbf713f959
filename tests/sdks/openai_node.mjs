// OpenAI's client for JavaScript; how scripts are played stands in `playing.py`.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, apiKey] = [process.env.SDK_URL, process.env.SDK_KEY];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const SAID = "Hello you, how are you?";
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, people: { type: "integer" } },
  required: ["name", "people"],
  additionalProperties: false,
};
const PLACE = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const TOOL = { type: "function", function: { name: "weather", parameters: PLACE } };

function ask(text = "Where is it sunny?", more = {}) {
  return { model: "m", messages: [{ role: "user", content: text }], ...more };
}

async function read(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function chat() {
  const answer = await client.chat.completions.create(ask());
  assert.equal(answer.choices[0].message.content, SAID);
  assert.equal(answer.usage.prompt_tokens_details.cached_tokens, 3);
  const older = await client.completions.create({ model: "m", prompt: "hello", max_tokens: 9 });
  assert.equal(older.choices[0].text, SAID);
}

async function stream() {
  const more = { stream: true, stream_options: { include_usage: true } };
  const chunks = await read(await client.chat.completions.create(ask(undefined, more)));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), SAID);
  assert.equal(chunks.at(-1).usage.completion_tokens, 5);
  const final = await client.chat.completions.stream(ask()).finalChatCompletion();
  assert.equal(final.choices[0].message.content, SAID);
}

async function tools() {
  const wish = ask(undefined, { tools: [TOOL], tool_choice: "required" });
  const answer = await client.chat.completions.create(wish);
  const [call] = answer.choices[0].message.tool_calls;
  assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["weather", { city: "Rome" }]);
  const final = await client.chat.completions.stream(wish).finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  const result = { role: "tool", tool_call_id: call.id, content: "sun" };
  const messages = [...wish.messages, answer.choices[0].message, result];
  const last = await client.chat.completions.create({ model: "m", messages, tools: [TOOL] });
  assert.equal(last.choices[0].message.content, SAID);
}

async function structured() {
  const response_format = { type: "json_schema", json_schema: { name: "city", schema: SCHEMA, strict: true } };
  const answer = await client.chat.completions.parse(ask(undefined, { response_format }));
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), { name: "Rome", people: 3 });
}

async function responses() {
  const answer = await client.responses.create({ model: "m", input: "Where is it sunny?", store: false });
  assert.equal(answer.output_text, SAID);
  const final = await client.responses.stream({ model: "m", input: "Where is it sunny?" }).finalResponse();
  assert.equal(final.output_text, SAID);
  const tool = { type: "function", name: "weather", parameters: PLACE, strict: false };
  const wish = { model: "m", input: "Where?", tools: [tool], tool_choice: "required" };
  const called = await client.responses.stream(wish).finalResponse();
  assert.deepEqual(JSON.parse(called.output[0].arguments), { city: "Rome" });
  const format = { type: "json_schema", name: "city", schema: SCHEMA, strict: true };
  const parsed = await client.responses.create({ model: "m", input: "Which?", text: { format } });
  assert.deepEqual(JSON.parse(parsed.output_text), { name: "Rome", people: 3 });
}

async function embeddings() {
  const answer = await client.embeddings.create({ model: "m", input: ["one", "two"] });
  assert.deepEqual(answer.data.map((one) => one.embedding.length), [2, 2]);
  const models = await read(await client.models.list());
  assert.deepEqual(models.map((model) => model.id), ["cold", "m"]);
  assert.ok(models.every((model) => model.created > 0));
}

async function errors() {
  for (const stream of [false, true]) {
    const create = (text, more) => client.chat.completions.create(ask(text, { stream, ...more }));
    await assert.rejects(create(undefined, { model: "none" }), OpenAI.NotFoundError);
    await assert.rejects(create(undefined, { temperature: 7 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      return error.param === "temperature";
    });
    await assert.rejects(create(undefined, { model: "cold" }), OpenAI.InternalServerError);
    await assert.rejects(create("Fail."), OpenAI.InternalServerError);
  }
  const other = client.withOptions({ apiKey: "wrong" });
  await assert.rejects(other.chat.completions.create(ask()), OpenAI.AuthenticationError);
  const begun = await client.chat.completions.create(ask("Break off.", { stream: true }));
  await assert.rejects(read(begun), (error) => error instanceof OpenAI.APIError && /out of ideas/.test(error));
  const response = await client.responses.create({ model: "m", input: "Break off.", stream: true });
  await assert.rejects(read(response), (error) => error instanceof OpenAI.APIError && /out of ideas/.test(error));
  await assert.rejects(client.responses.create({ model: "m", input: "x", previous_response_id: "resp_1" }), OpenAI.BadRequestError);
}

for (const part of [chat, stream, tools, structured, responses, embeddings, errors]) {
  await part();
  console.log(`${part.name}: passed`);
}
