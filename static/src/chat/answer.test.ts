import { describe, expect, it } from "vitest";
import { newAnswer, extended, figuresOf, messagesOf, speedOf, type Answer } from "./answer";
import type { Piece } from "./stream";
import { grown, NO_BLOCKS, textOf } from "./blocks";
import { requestOf, UNSET, wrongIn } from "./settings";
import { curl, python } from "./snippets";

function piece(overrides: Partial<Piece>): Piece {
  return { text: "", reasoning: "", tools: [], finish: "", usage: null, at: 0, ...overrides };
}

function answer(...pieces: Piece[]): Answer {
  return extended({ ...newAnswer("m"), sentAt: 1000 }, pieces);
}

describe("figures of an answer (UI-10.6)", () => {
  const usage = { prompt_tokens: 40, completion_tokens: 11 };
  const pieces = [piece({ at: 1100 }), piece({ text: "a", at: 1250 }), piece({ text: "b", at: 2250 }), piece({ finish: "stop", at: 2260 }), piece({ usage, at: 2261 })];

  it("count from the request to the first token, and the tokens after it", () => {
    expect(figuresOf({ ...answer(...pieces), state: "done" })).toEqual(["first token after 0.25 s", "10 tokens/s", "40 prompt + 11 answer tokens", "finished"]);
  });

  it("say that the load is in it, that it was cut off, and what of the prompt was cached", () => {
    const cached = piece({ usage: { ...usage, prompt_tokens_details: { cached_tokens: 30 } } });
    const result = { ...answer(...pieces, cached, piece({ finish: "length" })), state: "done", cold: true } as const;
    expect(figuresOf(result)).toEqual([
      "first token after 0.25 s, load included", "10 tokens/s", "40 prompt + 11 answer tokens", "75% of the prompt cached", "cut off at the token limit (length)",
    ]);
  });

  it("are left out where they are not known", () => {
    expect(figuresOf({ ...answer(), state: "failed" })).toEqual([]);
    expect(figuresOf({ ...answer(piece({ text: "a", at: 1500 })), state: "stopped" })).toEqual(["first token after 0.50 s", "stopped"]);
    // All at once says nothing of the engine.
    expect(speedOf(answer(piece({ text: "a", at: 5 }), piece({ text: "b", at: 6 }), piece({ usage })))).toBeNull();
    expect(figuresOf(answer(piece({ finish: "odd" })))).toEqual(["ended: odd"]);
  });

  it("put tool calls together from their pieces", () => {
    const result = answer(
      piece({ tools: [{ index: 0, function: { name: "look", arguments: '{"a"' } }] }),
      piece({ tools: [{ index: 0, function: { arguments: ":1}" } }, { index: 1, function: { name: "go", arguments: "" } }] }),
    );
    expect(result.tools).toEqual([{ name: "look", arguments: '{"a":1}' }, { name: "go", arguments: "" }]);
  });
});

describe("blocks of Markdown that grows (UI-10.4)", () => {
  const text = "# One\n\nA paragraph\nof two lines.\n\n- a\n\n- b\n  - c\n\n1. x\n\n```py\nprint('''\n\n# no heading\n''')\n```\n    \n> quote\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nlast";

  it("are the same, letter by letter and at once, and lose nothing", () => {
    const at_once = grown(NO_BLOCKS, text);
    const by_letter = Array.from(text).reduce((blocks, letter) => grown(blocks, letter), NO_BLOCKS);
    expect(by_letter).toEqual(at_once);
    expect(textOf(at_once)).toBe(text);
    expect(at_once.done.map((block) => block.trim().split("\n")[0])).toEqual(["# One", "A paragraph", "- a", "1. x", "```py", "> quote", "| a | b |"]);
    expect(at_once.tail).toBe("last");
  });

  it("stay what they are once they are finished", () => {
    let previous = NO_BLOCKS;
    for (const letter of text) {
      const after = grown(previous, letter);
      expect(after.done.slice(0, previous.done.length)).toEqual(previous.done);
      previous = after;
    }
  });
});

describe("what is asked (UI-10.2)", () => {
  it("has the settings that are typed, and nothing else", () => {
    expect(requestOf("m", UNSET, [])).toEqual({ model: "m", messages: [] });
    const settings = { system: "Be brief.", temperature: "0.5", maxTokens: "20", stop: "END\n\n###", seed: "7" };
    expect(requestOf("m", settings, [{ role: "user", content: "hi" }])).toEqual({
      model: "m", temperature: 0.5, max_tokens: 20, stop: ["END", "###"], seed: 7,
      messages: [{ role: "system", content: "Be brief." }, { role: "user", content: "hi" }],
    });
    expect(wrongIn(settings)).toEqual({});
  });

  it("is refused at the field", () => {
    const problems = wrongIn({ system: "", temperature: "hot", maxTokens: "1.5", stop: "a\n".repeat(17), seed: "x" });
    expect(Object.keys(problems).sort()).toEqual(["maxTokens", "seed", "stop", "temperature"]);
    expect(wrongIn({ ...UNSET, temperature: "2.1", maxTokens: "0" })).toMatchObject({ temperature: "Enter a number from 0 to 2.", maxTokens: "Enter a whole number from 1." });
  });

  it("leaves out questions that were not answered", () => {
    const turns = [{ id: 1, question: "a", answer: answer(piece({ text: "A" })) }, { id: 2, question: "b", answer: answer() }];
    expect(messagesOf(turns)).toEqual([{ role: "user", content: "a" }, { role: "assistant", content: "A" }]);
  });
});

describe("the conversation elsewhere (UI-10.9)", () => {
  const request = requestOf("m", { ...UNSET, stop: "'" }, [{ role: "user", content: 'It\'s "so"\n$HOME `x` \\' }]);

  it("is quoted for a shell, with the name of a key and no key", () => {
    const text = curl("http://h:1", request);
    expect(text).toContain('"Authorization: Bearer $LOCALAI_API_KEY"');
    // Between the quotes of the shell nothing is special, and each of its own is closed, escaped and opened again.
    const body = text.slice(text.indexOf("-d '") + 4, -1).replaceAll(String.raw`'\''`, "'");
    expect(JSON.parse(body)).toEqual({ ...request, stream: true });
  });

  it("is Python that reads the key from the environment", () => {
    const text = python("http://h:1", request);
    expect(text).toContain('api_key=os.environ["LOCALAI_API_KEY"]');
    expect(text).toContain(`        {"role":"user","content":"It's \\"so\\"\\n$HOME \`x\` \\\\"},`);
    expect(text).toContain(`    stop=["'"],`);
  });
});
