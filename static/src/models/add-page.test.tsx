import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it } from "vitest";
import { node, show } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { AddModelPage } from "./add-page";
import { answerBy, Refusal } from "./model-fixtures";
import type { CatalogueModel, Source, SourceVariant } from "./shapes";
import { filterAddress, filterOf, isShareable } from "./sources";

const GIB = 1024 ** 3;

let sent: ReturnType<typeof answerBy>;
let source: Source | Refusal;
let store: LiveStore;
let asked: Record<string, unknown>[];
/** What the server says of the first row of the catalogue now. */
let row: Partial<CatalogueModel>;

function variant(id: string, overrides: Partial<SourceVariant> = {}): SourceVariant {
  return {
    id, label: id, quantization: id, size: 4 * GIB, files: [], licence: "", gated: false, recommended: false, context_size: 8192,
    fit: { fits: true, summary: "fits on n1", nodes: [{ node_id: "n1", node_name: "n1", fits: true, reason: "" }] }, ...overrides,
  };
}

function sourceOf(overrides: Partial<Source> = {}): Source {
  return {
    kind: "huggingface", title: "org/tiny", description: "A small model.", licence: "mit", gated: false, urls: ["https://example.org/tiny", "javascript:alert(1)"], icon: "", commit: "abcdef0123456789",
    name: "tiny", task: "chat", variants: [variant("Q8_0", { size: 8 * GIB }), variant("Q4_K_M", { recommended: true })], candidates: [], problem: "", ...overrides,
  };
}

const MODEL: CatalogueModel = { id: "mine@bert", name: "bert", gallery: "mine", description: "Embeds.", icon: "", licence: "apache-2.0", tags: [], task: "embeddings", size: GIB, installed: false, jobID: "", fits: true };

function operation(overrides: Partial<Operation>): Operation {
  return {
    jobID: "j1", id: "tiny", kind: "model_import", fullName: "tiny", name: "tiny", status: "processing", seq: 1, progress: 40, taskType: "staging", isDeletion: false, isBackend: false, message: "", phase: "downloading",
    attempts: 0, nextLookAt: "", createdAt: "2026-08-22T10:00:00Z", actor: "x", requestID: "", currentBytes: GIB, totalBytes: 4 * GIB, ...overrides,
  } as Operation;
}

beforeEach(() => {
  source = sourceOf();
  asked = [];
  row = {};
  sent = answerBy((path, { params }) => {
    if (path === "/api/sources/inspect") return source;
    if (path === "/api/catalogue") {
      asked.push(params?.query ?? {});
      return { models: [{ ...MODEL, ...row }, { ...MODEL, id: "mine@done", name: "done", installed: true, fits: null }], total: 60, page: 1, items: 24, tasks: ["chat", "embeddings"], licences: ["mit"], galleries: ["mine"], gallery_errors: [] };
    }
    if (path === "/api/models/import") return { jobID: "j1", statusUrl: "", message: "", model: "tiny" };
    return path === "/api/operations/{job_id}" ? operation({}) : [];
  });
  store = show(new LiveStore(), node("n1"));
  store.push({ type: "operations.snapshot", seq: 1, operations: [] });
  stage(store, createMemoryRouter([{ path: "*", element: <AddModelPage /> }]));
});

afterEach(cleanup);

function paste(text: string): void {
  fireEvent.change(screen.getByLabelText("Name, address or definition"), { target: { value: text } });
}

it("goes from a pasted text by one button to the chat (UI-8.8)", async () => {
  paste("hf.co/org/tiny");
  fireEvent.click(await screen.findByRole("button", { name: "Download 4 GiB and load" }));
  await waitFor(() => expect(sent.at(-1)).toEqual(["POST", "/api/models/import", { text: "hf.co/org/tiny", load: true, variant: "Q4_K_M" }]));
  const progress = within(await screen.findByRole("region", { name: "Your model" }));
  expect((await progress.findByRole("progressbar")).getAttribute("aria-valuenow")).toBe("40");
  expect(progress.getByText(/1 GiB \/ 4 GiB/)).toBeTruthy();
  expect(progress.queryByRole("link", { name: "Chat" })).toBeNull();
  store.push({ type: "operations.delta", seq: 2, operations: [operation({ status: "completed", seq: 2 })], partial: [] });
  expect((await progress.findByRole("link", { name: "Chat" })).getAttribute("href")).toBe("/app/chat?model=tiny");
});

it("says what the text is: variants with size and fit, and only links to the web", async () => {
  paste("hf.co/org/tiny");
  const found = within(await screen.findByRole("region", { name: "org/tiny" }));
  expect(found.getAllByRole("radio").map((radio) => (radio as HTMLInputElement).checked)).toEqual([false, true]);
  expect(found.getByText("8 GiB")).toBeTruthy();
  expect(found.getAllByText("fits on n1")).toHaveLength(2);
  expect(found.getAllByRole("link").map((link) => link.getAttribute("href"))).toEqual(["https://example.org/tiny"]);
  fireEvent.click(found.getByRole("radio", { name: /Q8_0/ }));
  expect(found.getByRole("button", { name: "Download 8 GiB and load" })).toBeTruthy();
  fireEvent.change(found.getByLabelText("Name of the model"), { target: { value: "mine" } });
  fireEvent.click(found.getByRole("checkbox"));
  fireEvent.click(found.getByRole("button", { name: "Download 8 GiB" }));
  await waitFor(() => expect(sent.at(-1)?.[2]).toEqual({ text: "hf.co/org/tiny", load: false, variant: "Q8_0", name: "mine" }));
});

it("says a refusal in the words of the source, and a problem that stands in the way", async () => {
  source = new Refusal(403, "Accept the licence at example.org first");
  paste("org/gated");
  expect((await screen.findByRole("alert")).textContent).toContain("Accept the licence at example.org first");
  source = sourceOf({ problem: "No file of this repository can be loaded.", variants: [] });
  paste("org/other");
  expect(await screen.findByText("No file of this repository can be loaded.")).toBeTruthy();
  expect(screen.getByRole("button", { name: "Add and load" }).getAttribute("aria-disabled")).toBe("true");
});

it("says a refusal of the text as a sentence, without the name of the server's field", async () => {
  source = new Refusal(400, "text: is not a repository such as owner/name: ''");
  paste("hf.co/");
  expect((await screen.findByRole("alert")).textContent).toContain("This text is not a repository such as owner/name: ''");
});

it("does not call a pasted definition downloaded", async () => {
  source = sourceOf({ kind: "definition", variants: [variant("default", { size: 0 })] });
  paste("name: tiny\nbackend: echo\n");
  fireEvent.click(await screen.findByRole("button", { name: /and load$/ }));
  const progress = within(await screen.findByRole("region", { name: "Your model" }));
  store.push({ type: "operations.delta", seq: 2, operations: [operation({ status: "completed", seq: 2 })], partial: [] });
  await progress.findByRole("link", { name: "Chat" });
  expect(progress.getByRole("status").textContent.trim()).toBe("Added.");
});

it("offers the candidates of a bare name", async () => {
  source = sourceOf({ kind: "search", candidates: [{ text: "hf://org/tiny", title: "org/tiny", kind: "huggingface", description: "", size: 0 }] });
  paste("tiny");
  fireEvent.click(await screen.findByRole("button", { name: "Choose org/tiny" }));
  expect(screen.getByLabelText<HTMLTextAreaElement>("Name, address or definition").value).toBe("hf://org/tiny");
});

it("asks once the typing rests, for the last text only", async () => {
  for (const text of ["h", "hf", "hf.co/org/tiny"]) paste(text);
  await screen.findByRole("region", { name: "org/tiny" });
  expect(sent.map(([, , body]) => body)).toEqual([{ text: "hf.co/org/tiny" }]);
});

it("lists the catalogue with its filters; a chosen model is looked at on top (UI-8.8)", async () => {
  const catalogue = within(await screen.findByRole("region", { name: "Catalogue" }));
  expect(await catalogue.findByText("Page 1 of 3")).toBeTruthy();
  expect(catalogue.getByRole("link", { name: "Open done" }).getAttribute("href")).toBe("/app/models/done");
  fireEvent.click(catalogue.getByRole("checkbox", { name: "Fits on my nodes" }));
  fireEvent.click(catalogue.getByRole("button", { name: "Next" }));
  await waitFor(() => expect(asked.at(-1)).toEqual({ fits: "true", page: 2, items: 24 }));
  fireEvent.click(catalogue.getByRole("button", { name: "Choose bert" }));
  expect(screen.getByLabelText<HTMLTextAreaElement>("Name, address or definition").value).toBe("mine@bert");
  expect(document.activeElement).toBe(screen.getByLabelText("Name, address or definition"));
});

it("shows how far the import of a row is, and the ways to the model after it (UI-8.8)", async () => {
  const catalogue = within(await screen.findByRole("region", { name: "Catalogue" }));
  await catalogue.findByRole("button", { name: "Choose bert" });
  row = { task: "chat", jobID: "j2" };
  store.push({ type: "operations.delta", seq: 2, operations: [operation({ jobID: "j2", fullName: "bert", name: "bert", seq: 2 })], partial: [] });
  expect((await catalogue.findByRole("link", { name: "bert: being added" })).getAttribute("href")).toBe("/app/operations/j2");
  expect((await catalogue.findByRole("progressbar")).getAttribute("aria-valuenow")).toBe("40");
  expect(catalogue.getByText(/1 GiB \/ 4 GiB/)).toBeTruthy();
  row = { task: "chat", installed: true };
  store.push({ type: "operations.delta", seq: 3, operations: [operation({ jobID: "j2", fullName: "bert", name: "bert", seq: 3, status: "completed" })], partial: [] });
  expect((await catalogue.findByRole("link", { name: "Chat with bert" })).getAttribute("href")).toBe("/app/chat?model=bert");
  expect(catalogue.getByRole("link", { name: "Open bert" }).getAttribute("href")).toBe("/app/models/bert");
  expect(catalogue.queryByRole("progressbar")).toBeNull();
});

it("offers a row again when its import is cancelled", async () => {
  row = { jobID: "j2" };
  store.push({ type: "operations.delta", seq: 2, operations: [operation({ jobID: "j2", seq: 2 })], partial: [] });
  const catalogue = within(await screen.findByRole("region", { name: "Catalogue" }));
  await catalogue.findByRole("link", { name: "bert: being added" });
  row = {};
  store.push({ type: "operations.delta", seq: 3, operations: [operation({ jobID: "j2", seq: 3, status: "cancelled" })], partial: [] });
  expect(await catalogue.findByRole("button", { name: "Choose bert" })).toBeTruthy();
});

it("keeps the filters of the catalogue in the address", () => {
  const query = new URLSearchParams("q=llama&task=chat&size=8&fits=true&page=3");
  expect(filterAddress(filterOf(query)).toString()).toBe(query.toString());
  expect(filterOf(new URLSearchParams("size=7&page=x"))).toMatchObject({ size: "", page: 1, fits: false });
});

it("puts no text with a part that may be a secret into the address", () => {
  const shared = ["hf.co/org/Tiny-7B-Instruct-GGUF", "ollama run qwen3:4b", "s3://bucket/models/tiny", "mine@bert", "https://example.org:8443/a", "ollama://qwen3:4b"];
  const kept = ["https://ada:pass", "s3://key:1234", "https://ada:pass@example.org/a", "https://ada@example.org/a", "s3.example.org:key@x", "https://example.org/a?token=1", "a#b", "hf_abcdefghijklmnopqrstu", "name: a\nbackend: b", ""];
  expect([shared.filter((text) => !isShareable(text)), kept.filter(isShareable)]).toEqual([[], []]);
});
