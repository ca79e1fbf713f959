// The conversation as a request of one's own: for a shell, and for OpenAI's client in Python. Never with a key in it. Pure.
import type { Request } from "./settings";

export function curl(origin: string, request: Request): string {
  const body = JSON.stringify({ ...request, stream: true }, null, 2);
  return [
    `curl -N ${origin}/v1/chat/completions \\`,
    `  -H "Authorization: Bearer $LOCALAI_API_KEY" \\`,
    `  -H "Content-Type: application/json" \\`,
    `  -d ${quoted(body)}`,
  ].join("\n");
}

/** For a shell. */
function quoted(text: string): string {
  return `'${text.replaceAll("'", String.raw`'\''`)}'`;
}

/** Texts, numbers and lists of them are written alike in JSON and Python. */
export function python(origin: string, request: Request): string {
  const { messages, ...settings } = request;
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=os.environ["LOCALAI_API_KEY"])`,
    "stream = client.chat.completions.create(",
    ...Object.entries(settings).map(([name, value]) => `    ${name}=${JSON.stringify(value)},`),
    "    messages=[",
    ...messages.map((message) => `        ${JSON.stringify(message)},`),
    "    ],",
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "print()",
  ].join("\n");
}

/** An embedding, for a shell. */
export function embed(origin: string, model: string): string {
  return [`curl ${origin}/v1/embeddings \\`, `  -H "Authorization: Bearer $LOCALAI_API_KEY" \\`, `  -H "Content-Type: application/json" \\`, `  -d ${quoted(JSON.stringify({ model, input: "Hello!" }))}`].join("\n");
}
