// Time limits of the unit tests, for a busy machine; a passing test does not wait for them.
import { configure } from "@testing-library/react";
import { vi } from "vitest";

const LONG = 30_000;

configure({ asyncUtilTimeout: LONG });
const { waitFor } = vi;
vi.waitFor = (callback, options = LONG) => waitFor(callback, options);

// Outside of a browser an address needs its host, and the client takes `Request` when it is made.
const Plain = globalThis.Request;
globalThis.Request = class extends Plain {
  constructor(input: RequestInfo | URL, init?: RequestInit) {
    super(typeof input === "string" ? new URL(input, "http://localhost") : input, init);
  }
};

// Of the browser's streams jsdom shows only those of answers.
Object.assign(globalThis, { ReadableStream: new Response("x").body?.constructor });

// A list of choices asks for both, which jsdom does not have.
if (typeof Element !== "undefined") Object.assign(Element.prototype, { scrollIntoView: () => undefined, hasPointerCapture: () => false });
