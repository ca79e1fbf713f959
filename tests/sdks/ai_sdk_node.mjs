// The Vercel AI SDK; how scripts are played stands in `playing.py`.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const { SDK_URL: url, SDK_KEY: apiKey, SDK_STORE } = process.env;
const isStored = SDK_STORE === "1";
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const ASK = "Where is it sunny?";
const SAID = "Hello you, how are you?";
const SCHEMA = jsonSchema({
  type: "object",
  properties: { name: { type: "string" }, people: { type: "integer" } },
  required: ["name", "people"],
  additionalProperties: false,
});
const asked = [];
const weather = tool({
  description: "The weather of a city.",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
  execute: async ({ city }) => (asked.push(city), "sun"),
});
const models = [openai("m"), openai.chat("m")];
const unstored = { openai: { store: false } };

function wish(model, more = {}) {
  return { model, prompt: ASK, maxRetries: 0, ...more };
}

async function chat() {
  for (const model of models) {
    const answer = await generateText(wish(model));
    assert.equal(answer.text, SAID);
    assert.equal(answer.usage.outputTokens, 5);
    const stream = streamText(wish(model));
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, SAID);
  }
}

async function tools() {
  for (const model of models) {
    asked.length = 0;
    const more = { tools: { weather }, stopWhen: stepCountIs(3) };
    assert.equal((await generateText(wish(model, more))).text, SAID);
    assert.deepEqual(asked, ["Rome"]);
  }
}

async function turns() {
  for (const model of models) {
    const providerOptions = isStored ? {} : unstored;
    const messages = [{ role: "user", content: ASK }];
    const first = await generateText({ model, messages, providerOptions, maxRetries: 0 });
    messages.push(...first.response.messages, { role: "user", content: "And now?" });
    const second = await generateText({ model, messages, providerOptions, maxRetries: 0 });
    assert.equal(second.text, SAID);
    // Unless it is told not to, this client refers to the answer instead of sending it.
    if (model === models[0] && !isStored) {
      const { messages: answers } = (await generateText({ model, prompt: ASK, maxRetries: 0 })).response;
      const turn = [{ role: "user", content: ASK }, ...answers, { role: "user", content: "And now?" }];
      await assert.rejects(generateText({ model, messages: turn, maxRetries: 0 }), (error) => {
        assert.equal(error.statusCode, 400);
        return APICallError.isInstance(error) && /nothing is kept here/.test(error.message);
      });
    }
    if (model === models[0] && isStored) {
      const previousResponseId = second.providerMetadata.openai.responseId;
      const third = await generateText(wish(model, { providerOptions: { openai: { previousResponseId } } }));
      assert.equal(third.text, SAID);
    }
  }
}

async function structured() {
  for (const model of models) {
    const answer = await generateText(wish(model, { output: Output.object({ schema: SCHEMA }) }));
    assert.deepEqual(answer.output, { name: "Rome", people: 3 });
  }
}

async function embeddings() {
  const answer = await embedMany({ model: openai.embedding("m"), values: ["one", "two"], maxRetries: 0 });
  assert.deepEqual(answer.embeddings.map((vector) => vector.length), [2, 2]);
}

async function errors() {
  for (const name of ["none", "cold"]) {
    await assert.rejects(generateText(wish(openai(name))), (error) => {
      assert.equal(error.statusCode, name === "none" ? 404 : 503);
      return APICallError.isInstance(error);
    });
  }
}

for (const part of [chat, tools, turns, structured, embeddings, errors]) {
  await part();
  console.log(`${part.name}: passed`);
}
