// Records the requests of a page in a unit test, and answers them.
import { beforeEach, vi } from "vitest";
import { client } from "../api/client";

/** The recorded requests: path and body. With `refused` the server refuses each request by this message. */
export const posted: { written: [string, unknown][]; refused: string | null } = { written: [], refused: null };

/** From now on, in each test of this file: requests are written down; a refusal has this status and type. */
export function watchPosts(code: number, type: string): void {
  beforeEach(() => {
    posted.written = [];
    posted.refused = null;
    vi.spyOn(client, "POST").mockImplementation(((path: string, sent: { body?: unknown }) => {
      posted.written.push([path, sent.body]);
      const answer =
        posted.refused === null
          ? { data: {}, response: new Response(null, { status: 202 }) }
          : { error: { error: { code, message: posted.refused, type } }, response: new Response(null, { status: code }) };
      return Promise.resolve(answer);
    }) as never);
  });
}
