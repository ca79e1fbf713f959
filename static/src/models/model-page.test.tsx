import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { model, node, show } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { kindOf } from "./diff";
import { changesOf, offsetOf, problemsOf, rebased, typedOf } from "./editor-form";
import { answerBy, definition, detail, FORM, previewOf, Refusal } from "./model-fixtures";
import { ModelPage } from "./model-page";
import type { DefinitionDetail, DefinitionPreview, DefinitionRow, Revision } from "./shapes";

vi.mock("../overview/charts", () => ({ Charts: ({ model: name }: { model: string }) => <p>Charts of {name}</p> }));

let sent: ReturnType<typeof answerBy>;
let stored: DefinitionDetail;
let preview: DefinitionPreview;
let saved: () => unknown;
let listed: DefinitionRow;
let revisions: readonly Revision[];

const REVISIONS: readonly Revision[] = [
  { number: 3, actor: "ada", at: "2026-08-22T10:00:00Z", reason: "more context", origin: "editor", diff: "--- 2\n+++ 3\n@@ -3 +3 @@\n-context_size: 4096\n+context_size: 8192\n" },
  { number: 2, actor: "bob", at: "2026-08-21T10:00:00Z", reason: "", origin: "import", diff: "" },
];

beforeEach(() => {
  stored = detail("tiny");
  preview = previewOf("tiny");
  saved = () => ({ ...stored, revision: 4 });
  listed = definition("tiny");
  revisions = REVISIONS;
  sent = answerBy((path, _, method) => {
    if (path === "/api/definitions") return { definitions: [listed], total: 1, unusable: [] };
    if (path === "/api/figures/models") return { models: [] };
    if (path === "/api/placement/fit") return { models: [{ model: "tiny", defined: true, fitting: 0, possible: 0, says: "not on n1: 77.0 GiB missing" }] };
    if (path === "/api/definitions/preview") return preview;
    if (path === "/api/definitions/{name}/revisions") return { revisions };
    if (path === "/api/definitions/{name}") return method === "PUT" ? saved() : stored;
    if (path.endsWith("/clone")) return new Refusal(409, "the definition of tiny is at revision 3");
    return path.endsWith("/restore") ? { ...stored, revision: 4 } : [];
  });
});

afterEach(cleanup);

function open(tab = "", ...operations: Operation[]): LiveStore {
  const store = show(new LiveStore(), node("n1", { models: listed.state === "disabled" ? [] : [model("tiny", 0)] }), node("n2"));
  store.push({ type: "operations.snapshot", seq: 1, operations });
  const routes = [{ path: "/app/models/:name/:tab?", element: <ModelPage /> }, { path: "*", element: <p>Another page</p> }];
  stage(store, createMemoryRouter(routes, { initialEntries: [`/app/models/tiny${tab}`] }));
  return store;
}

const changes = () => sent.filter(([, path]) => path !== "/api/definitions/preview");

it("does not promise that a request loads a disabled model", async () => {
  listed = definition("tiny", { state: "disabled" });
  open();
  expect(await screen.findByText("Not running. Requests cannot load the model: disabled.")).toBeTruthy();
});

it("says at the name of a copy that it is taken, until another name is typed", async () => {
  open();
  fireEvent.keyDown(await screen.findByRole("button", { name: /^More/ }), { key: "Enter" });
  fireEvent.click(await screen.findByRole("menuitem", { name: "Clone…" }));
  const dialog = within(await screen.findByRole("dialog"));
  fireEvent.click(dialog.getByRole("button", { name: "Clone" }));
  expect(await dialog.findByText("A model with this name exists.")).toBeTruthy();
  fireEvent.change(dialog.getByLabelText("Name of the copy"), { target: { value: "other" } });
  await waitFor(() => expect(dialog.queryByText("A model with this name exists.")).toBeNull());
});

it("shows replicas and figures, and the ways to the parts (E65, UI-8.2)", async () => {
  open();
  const replicas = within(await screen.findByRole("table", { name: "Replicas of tiny" }));
  expect(replicas.getAllByRole("row")[1]?.textContent).toMatch(/^n10loaded/);
  expect(await screen.findByText("Charts of tiny")).toBeTruthy();
  const parts = within(screen.getByRole("navigation", { name: "Sections of this model" })).getAllByRole("link");
  expect(parts.map((link) => [link.textContent, link.getAttribute("href")])).toEqual([
    ["Overview", "/app/models/tiny"], ["Definition", "/app/models/tiny/definition"], ["Revisions", "/app/models/tiny/revisions"], ["Files", "/app/models/tiny/files"], ["Try it", "/app/models/tiny/try"],
  ]);
});

it("says of a model that does not run where it would fit (UW9)", async () => {
  open().push({ type: "nodes.snapshot", cursor: "e:1", nodes: [node("n1")] });
  const replicas = within(await screen.findByRole("region", { name: "Replicas" }));
  expect(await replicas.findByText("not on n1: 77.0 GiB missing")).toBeTruthy();
});

it("shows the progress of a load, and the reason of a failed one until it is dismissed (UI-8.3)", async () => {
  const load = { jobID: "j1", kind: "model_load", id: "tiny", fullName: "tiny", name: "tiny", status: "processing", seq: 1, progress: 40, phase: "loading", message: "", attempts: 0, nextLookAt: "" } as unknown as Operation;
  const failed = { ...load, jobID: "j2", status: "failed", error: "out of memory" } as Operation;
  const store = open("", load, failed);
  const work = within(await screen.findByRole("region", { name: "Operations" }));
  expect(work.getByRole("progressbar").getAttribute("aria-valuenow")).toBe("40");
  expect(work.getByText("out of memory")).toBeTruthy();
  fireEvent.click(work.getByRole("button", { name: /^Dismiss tiny/ }));
  await waitFor(() => expect(sent.map(([, path]) => path)).toContain("/api/operations/{job_id}/dismiss"));
  store.push({ type: "operations.delta", seq: 2, operations: [{ ...failed, seq: 2, dismissedAt: "2026-08-22T10:00:00Z" }], partial: [] });
  await waitFor(() => expect(work.queryByText("out of memory")).toBeNull());
});

it("restores a revision after a question, with who, why and what changed", async () => {
  const store = open("/revisions");
  const newest = within(await screen.findByRole("list"));
  expect(newest.getByText("more context")).toBeTruthy();
  expect(newest.getByText("+context_size: 8192")).toBeTruthy();
  expect(newest.queryByRole("button", { name: "Restore revision 3" })).toBeNull();
  fireEvent.click(newest.getByRole("button", { name: "Restore revision 2" }));
  revisions = [{ number: 4, actor: "bob", at: "2026-08-22T11:00:00Z", reason: "", origin: "editor", diff: "" }, ...REVISIONS];
  store.push({ type: "definitions", revision: "2" });
  await screen.findByText("Revision 4");
  fireEvent.click(within(screen.getByRole("alertdialog")).getByRole("button", { name: "Restore" }));
  await waitFor(() => expect(changes()).toEqual([["POST", "/api/definitions/{name}/revisions/{number}/restore", { revision: 3 }]]));
});

it("shows the files, also one that is missing, one at its source and one of a folder that is not mounted", async () => {
  stored = detail("tiny", {
    files: [
      { path: "a.gguf", size: 1024 ** 3, present: true, source: "" },
      { path: "b.gguf", size: 0, present: false, source: "" },
      { path: "c.gguf", size: 1024 ** 3, present: false, source: "hf://o/r@0a/c.gguf" },
      { path: "d.gguf", size: 1024 ** 3, present: false, source: "" },
    ],
  });
  open("/files");
  const rows = within(await screen.findByRole("table", { name: "Files of tiny" })).getAllByRole("row");
  expect(rows.slice(1).map((row) => row.textContent)).toEqual(["a.gguf1 GiByes", "b.gguf" + "unknown" + "missing", "c.gguf1 GiB" + "no: nodes download it from hf://o/r@0a/c.gguf", "d.gguf1 GiB" + "unknown: the models folder cannot be read"]);
  expect(await screen.findByText("Also on nodes with a replica: n1.")).toBeTruthy();
});

it("leads to the chat and has a request to paste", async () => {
  open("/try");
  expect((await screen.findByRole("link", { name: "Chat with tiny" })).getAttribute("href")).toBe("/app/chat?model=tiny");
  expect(screen.getByText(/curl -N .*chat\/completions/)).toBeTruthy();
});

describe("the editor", () => {
  async function edit() {
    open("/definition");
    fireEvent.click(await screen.findByRole("button", { name: "Edit" }));
    return within(await screen.findByRole("region", { name: "Edit definition" }));
  }

  it("shows what a change would replace, and saves the changed fields with their reason (UI-8.6)", async () => {
    const editor = await edit();
    expect(editor.getByText("No changes yet.")).toBeTruthy();
    fireEvent.change(editor.getByLabelText("Context, tokens"), { target: { value: "4096" } });
    expect(editor.getByRole("button", { name: "Save" }).getAttribute("aria-disabled")).toBe("true");
    expect(await editor.findByText("1 replica is replaced")).toBeTruthy();
    expect(sent).toEqual([["POST", "/api/definitions/preview", { name: "tiny", changes: { context_size: 4096 } }]]);
    fireEvent.change(editor.getByLabelText("Reason"), { target: { value: "less memory" } });
    fireEvent.click(editor.getByRole("button", { name: "Save" }));
    await waitFor(() => expect(changes()).toEqual([["PUT", "/api/definitions/{name}", { changes: { context_size: 4096 }, revision: 3, reason: "less memory" }]]));
    expect(await screen.findByRole("button", { name: "Edit" })).toBeTruthy();
  });

  it("takes the form's changes into the YAML once they are checked, not the text of the check before", async () => {
    const editor = await edit();
    const yaml = editor.getByRole("button", { name: "YAML" });
    fireEvent.change(editor.getByLabelText("Context, tokens"), { target: { value: "4096" } });
    await editor.findByText("1 replica is replaced");
    preview = previewOf("tiny", { text: "context_size: 2048\n" });
    fireEvent.change(editor.getByLabelText("Context, tokens"), { target: { value: "2048" } });
    expect(yaml.getAttribute("aria-disabled")).toBe("true");
    await waitFor(() => expect(yaml.getAttribute("aria-disabled")).not.toBe("true"));
    fireEvent.click(yaml);
    expect(editor.getByLabelText<HTMLTextAreaElement>("YAML of tiny").value).toBe("context_size: 2048\n");
  });

  it("keeps what is typed on the other tabs, and asks before another page", async () => {
    const editor = await edit();
    fireEvent.change(editor.getByLabelText("Context, tokens"), { target: { value: "4096" } });
    fireEvent.click(screen.getByRole("link", { name: "Files" }));
    await screen.findByRole("region", { name: "Files" });
    expect(screen.queryByRole("region", { name: "Edit definition" })).toBeNull();
    fireEvent.click(screen.getByRole("link", { name: "Definition" }));
    expect(editor.getByLabelText<HTMLInputElement>("Context, tokens").value).toBe("4096");
    fireEvent.click(screen.getByRole("link", { name: "Models" }));
    fireEvent.click(within(await screen.findByRole("alertdialog", { name: /Leave without saving/ })).getByRole("button", { name: "Stay" }));
    await waitFor(() => expect(screen.queryByRole("alertdialog")).toBeNull());
    fireEvent.click(screen.getByRole("link", { name: "Models" }));
    fireEvent.click(within(await screen.findByRole("alertdialog")).getByRole("button", { name: "Leave" }));
    expect(await screen.findByText("Another page")).toBeTruthy();
  });

  it("marks the line of an error in the YAML and does not save it", async () => {
    const editor = await edit();
    preview = previewOf("tiny", { valid: false, errors: [{ line: 2, column: 10, path: "backend", message: "must be a text" }], replicas: [], diff: "" });
    fireEvent.click(editor.getByRole("button", { name: "YAML" }));
    const area = editor.getByLabelText<HTMLTextAreaElement>("YAML of tiny");
    fireEvent.change(area, { target: { value: "name: tiny\nbackend: 7\n" } });
    fireEvent.click(await editor.findByRole("button", { name: "Line 2, column 10" }));
    expect([document.activeElement === area, area.selectionStart]).toEqual([true, 20]);
    expect(editor.getByRole("button", { name: "Save" }).getAttribute("aria-disabled")).toBe("true");
    expect(editor.getByRole("button", { name: "Form" }).getAttribute("aria-disabled")).toBe("true");
    fireEvent.click(editor.getByRole("button", { name: "Discard changes" }));
    expect(area.value).toBe(stored.text);
  });

  it("keeps what is typed when somebody else saved meanwhile, and shows their change", async () => {
    const editor = await edit();
    fireEvent.change(editor.getByLabelText("Context, tokens"), { target: { value: "4096" } });
    await editor.findByText("1 replica is replaced");
    const before = stored;
    saved = () => {
      stored = { ...before, revision: 4, form: { ...FORM, parallel: 2 } };
      revisions = [{ number: 4, actor: "bob", at: "2026-08-22T11:00:00Z", reason: "", origin: "editor", diff: "+parallel: 2\n" }, ...REVISIONS];
      return new Refusal(409, "the definition has revision 4", "revision");
    };
    fireEvent.click(editor.getByRole("button", { name: "Save" }));
    const moved = within(await editor.findByRole("region", { name: "Change by another user" }));
    expect(await moved.findByText("+parallel: 2")).toBeTruthy();
    fireEvent.click(await moved.findByRole("button", { name: "Apply my changes to revision 4" }));
    expect([editor.getByLabelText<HTMLInputElement>("Context, tokens").value, editor.getByLabelText<HTMLInputElement>("Parallel slots").value]).toEqual(["4096", "2"]);
  });

  it("checks the same changes again once they apply to another revision", async () => {
    const editor = await edit();
    fireEvent.change(editor.getByLabelText("Context, tokens"), { target: { value: "4096" } });
    await editor.findByText("1 replica is replaced");
    saved = () => {
      stored = { ...stored, revision: 4 };
      preview = previewOf("tiny", { diff: "--- 4\n+++ new\n@@ -3 +3 @@\n-context_size: 1024\n+context_size: 4096\n" });
      return new Refusal(409, "the definition has revision 4", "revision");
    };
    fireEvent.click(editor.getByRole("button", { name: "Save" }));
    fireEvent.click(await editor.findByRole("button", { name: /^Apply my changes to revision/ }));
    expect(await editor.findByText("-context_size: 1024")).toBeTruthy();
  });

  it("shows another conflict than a newer revision until something else is typed, and saves then", async () => {
    const editor = await edit();
    const context = editor.getByLabelText("Context, tokens");
    fireEvent.change(context, { target: { value: "4096" } });
    await editor.findByText("1 replica is replaced");
    saved = () => new Refusal(409, "model other has another file tiny.gguf", "text");
    fireEvent.click(editor.getByRole("button", { name: "Save" }));
    expect(await editor.findByText(/another file tiny.gguf/)).toBeTruthy();
    expect(editor.queryByRole("region", { name: "Change by another user" })).toBeNull();
    fireEvent.change(context, { target: { value: "2048" } });
    await waitFor(() => expect(editor.queryByText(/another file tiny.gguf/)).toBeNull());
    await waitFor(() => expect(editor.getByRole("button", { name: "Save" }).getAttribute("aria-disabled")).not.toBe("true"));
  });

  it("neither seems to check an impossible value nor shows the effect of another one", async () => {
    const editor = await edit();
    const context = editor.getByLabelText("Context, tokens");
    fireEvent.change(context, { target: { value: "many" } });
    expect(editor.queryByText("Checking…")).toBeNull();
    expect(editor.getByText("Correct the marked fields.")).toBeTruthy();
    fireEvent.change(context, { target: { value: "4096" } });
    await editor.findByText("1 replica is replaced");
    fireEvent.change(context, { target: { value: "many" } });
    expect(editor.queryByText("1 replica is replaced")).toBeNull();
  });

  it("says that a file stays in force", async () => {
    stored = detail("tiny", { origin: "file", file: "tiny.yaml", shadowed: true });
    const editor = await edit();
    expect(editor.getByText(/stays in force/).textContent).toContain("tiny.yaml");
  });
});

describe("the form of a definition", () => {
  const form = FORM;

  it("sends only what was changed; an emptied number is removed", () => {
    expect(changesOf(form, typedOf(form))).toEqual({});
    expect(changesOf(form, { ...typedOf(form), context_size: "", options: " a:1 \n\nb:2", template: "{{ x }}" })).toEqual({ context_size: null, options: ["a:1", "b:2"], template: "{{ x }}" });
  });

  it("knows what is no number", () => {
    expect(problemsOf({ ...typedOf(form), parallel: "0", gpu_layers: "-1", max_tokens: "1.5" })).toEqual({
      parallel: "Enter a whole number from 1, or leave it empty.", max_tokens: "Enter a whole number from 1, or leave it empty.",
    });
  });

  it("puts only the typed fields onto a newer definition", () => {
    expect(rebased(form, { ...form, parallel: 4, context_size: 1 }, { ...typedOf(form), max_tokens: "9" })).toMatchObject({ parallel: "4", context_size: "1", max_tokens: "9" });
  });

  it("finds a place in the text, also one past its end", () => {
    expect([offsetOf("ab\ncd", 2, 2), offsetOf("ab\ncd", 1, 9), offsetOf("ab\ncd", 9, 1)]).toEqual([4, 2, 5]);
  });

  it("tells the lines of a diff apart", () => {
    expect(["+++ b", "--- a", "+x", "-x", "@@ -1 @@", " x", "---"].map(kindOf)).toEqual(["", "", "added", "removed", "place", "", ""]);
  });
});

it("leads back to the list of models when the deletion has begun (UI-8.6)", async () => {
  open();
  fireEvent.keyDown(await screen.findByRole("button", { name: /^More/ }), { key: "Enter" });
  fireEvent.click(await screen.findByRole("menuitem", { name: "Delete…" }));
  fireEvent.click(within(await screen.findByRole("alertdialog", { name: /Delete tiny/ })).getByRole("button", { name: "Delete" }));
  expect(await screen.findByText("Another page")).toBeTruthy();
  expect(changes()).toEqual([["DELETE", "/api/definitions/{name}", undefined]]);
});
