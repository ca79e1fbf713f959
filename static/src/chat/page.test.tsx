import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { model, node, show } from "../live/fixtures";
import type { LiveNode, Operation } from "../live/messages";
import { choose, stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { ended, event, Open, refused, contentEvent, serve, fullResponse } from "./fixtures";
import { ChatPage } from "./page";

const USER = { id: "", email: "", name: "ann", avatarUrl: "", role: "admin", provider: "local", permissions: {}, mustChangePassword: false };
const definition = (id: string, capabilities: string[] = [], overrides = {}) => ({ id, backend: "echo", capabilities, disabled: false, pinned: false, ...overrides });
const DEFINED = [definition("cold"), definition("minilm", ["FLAG_EMBEDDINGS"]), definition("smol", [], { warnings: ["Its template is not followed."] })];

let people = 0;
let scrolled: ReturnType<typeof vi.fn>;

beforeEach(() => {
  // Each test is another person, so that none finds another's conversation.
  people += 1;
  const user = { ...USER, id: String(people) };
  vi.spyOn(client, "GET").mockImplementation(((path: string) => Promise.resolve({ data: path === "/api/auth/status" ? { user } : { data: DEFINED }, response: new Response() })) as never);
  scrolled = vi.fn();
  vi.stubGlobal("scrollTo", scrolled);
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

const FLEET_NODES = [node("n1", { models: [model("smol", 0), model("smol", 1), model("minilm", 0)] })];

function open(address = "/app/chat", nodes: LiveNode[] = FLEET_NODES, ...operations: Operation[]) {
  const store = show(new LiveStore(), ...nodes);
  store.push({ type: "operations.snapshot", seq: 1, operations });
  const router = createMemoryRouter([{ path: "/app/chat", element: <ChatPage /> }, { path: "*", element: <p>elsewhere</p> }], { initialEntries: [address] });
  stage(store, router);
  return router;
}

const message = () => screen.findByRole<HTMLTextAreaElement>("textbox", { name: "Message" });

async function type(text: string): Promise<HTMLTextAreaElement> {
  await screen.findByRole("combobox", { name: "Model" });
  const field = await message();
  await waitFor(() => expect(screen.getByRole("combobox", { name: "Model" }).textContent).not.toContain("Choose"));
  fireEvent.change(field, { target: { value: text } });
  fireEvent.keyDown(field, { key: "Enter" });
  return field;
}

const answers = () => within(screen.getByRole("log", { name: "Conversation" })).getAllByRole("article").filter((element) => element.getAttribute("aria-label") !== "You");

describe("the models to talk to (UI-10.1)", () => {
  it("are the defined ones that are not for embeddings, with their state; one that is loaded is chosen", async () => {
    open();
    const field = await screen.findByRole("combobox", { name: "Model" });
    await waitFor(() => expect(field.textContent).toContain("smol (2 replicas loaded)"));
    expect(screen.getByText("Its template is not followed.")).toBeTruthy();
    await choose(field, "cold (not loaded)");
    expect(await screen.findByText("The first message loads this model.")).toBeTruthy();
  });

  it("can be named by the address", async () => {
    open("/app/chat?model=cold");
    const field = await screen.findByRole("combobox", { name: "Model" });
    expect(field.textContent).toContain("cold");
  });

  it("promises no load for one that is not defined", async () => {
    open("/app/chat?model=gone");
    expect((await screen.findByRole("combobox", { name: "Model" })).textContent).toContain("gone (not available)");
    expect(screen.queryByText("The first message loads this model.")).toBeNull();
    expect(screen.queryByText("not loaded")).toBeNull();
  });
});

describe("a talk", () => {
  it("shows the answer as it comes, then its figures and node, and says it once (UI-10.3, UI-10.6, UI-10.13)", async () => {
    const answer = new Open("n1");
    serve(answer);
    open();
    const field = await type("Hello");
    expect(field.value).toBe("");
    answer.send(contentEvent("**Hi** "));
    await waitFor(() => expect(answers()[0]?.querySelector("strong")?.textContent).toBe("Hi"));
    expect(screen.getByRole("log").getAttribute("aria-live")).toBe("off");
    expect(screen.getByTestId("announcer").textContent).toBe("");
    answer.send(contentEvent("there"), ended("length", { prompt_tokens: 10, completion_tokens: 4, prompt_tokens_details: { cached_tokens: 5 } }), "data: [DONE]\n\n");
    const figures = within(await screen.findByRole("list", { name: "Figures of this answer" }));
    expect(figures.getByRole("link", { name: "n1" }).getAttribute("href")).toBe("/app/nodes/n1");
    expect(figures.getAllByRole("listitem").map((element) => element.textContent)).toEqual(expect.arrayContaining(["10 prompt + 4 answer tokens", "50% of the prompt cached", "cut off at the token limit (length)"]));
    expect(screen.getByTestId("announcer").textContent).toBe("smol: **Hi** there");
  });

  it("goes by keyboard: Enter sends, Shift and Enter do not, Escape stops (UI-10.7, UI-10.13)", async () => {
    const answer = new Open();
    const sent = serve(answer);
    open();
    const field = await type("Hello");
    fireEvent.change(field, { target: { value: "more" } });
    fireEvent.keyDown(field, { key: "Enter" });
    expect(sent).toHaveLength(1);
    fireEvent.keyDown(field, { key: "Escape" });
    expect(await screen.findByText("stopped")).toBeTruthy();
    fireEvent.keyDown(field, { key: "Enter", shiftKey: true });
    fireEvent.keyDown(field, { key: "Enter", isComposing: true });
    expect([sent.length, field.value]).toEqual([1, "more"]);
    expect(screen.getByText("No answer. Later requests omit this question.")).toBeTruthy();
  });

  it("is edited and asked again; only the last one can be (UI-10.7)", async () => {
    const sent = serve(fullResponse(contentEvent("a")), fullResponse(contentEvent("b")), fullResponse(contentEvent("c")), fullResponse(contentEvent("d")));
    open();
    await type("one");
    await waitFor(() => expect(screen.getByRole("button", { name: "Regenerate" })).toBeTruthy());
    const field = await type("two");
    await waitFor(() => expect(answers()[1]?.textContent).toContain("b"));
    fireEvent.click(await screen.findByRole("button", { name: "Regenerate" }));
    await waitFor(() => expect(answers()[1]?.textContent).toContain("c"));
    fireEvent.click(await screen.findByRole("button", { name: "Edit" }));
    expect([field.value, document.activeElement]).toEqual(["two", field]);
    fireEvent.keyDown(field, { key: "Escape" });
    expect(field.value).toBe("");
    fireEvent.click(screen.getByRole("button", { name: "Edit" }));
    await type("three");
    await waitFor(() => expect(answers()[1]?.textContent).toContain("d"));
    expect(sent.at(-1)?.body.messages.map(({ content }) => content)).toEqual(["one", "a", "three"]);
  });

  it("folds reasoning and shows tool calls as code (UI-10.4)", async () => {
    const call = { tool_calls: [{ index: 0, function: { name: "look", arguments: '{"at":"sky"}' } }] };
    serve(fullResponse(event({ choices: [{ delta: { reasoning_content: "Let me think." } }] }), contentEvent("", call), ended("tool_calls")));
    open();
    await type("Hello");
    const folded = (await screen.findByText("Reasoning")).closest("details");
    expect([folded?.open, folded?.textContent]).toEqual([false, "ReasoningLet me think."]);
    expect(screen.getByText("look")).toBeTruthy();
    expect(screen.getByText(/"at": "sky"/)).toBeTruthy();
  });

  it("fails where the eye is, with a way to try again (UI-10.3, UI-10.8)", async () => {
    serve(refused(503, { message: "loading model smol failed: no room", type: "server_error" }), fullResponse(contentEvent("here")));
    open();
    await type("Hello");
    const problem = await within(screen.getByRole("log")).findByRole("alert");
    expect(problem.textContent).toContain("no room");
    fireEvent.click(within(problem).getByRole("button", { name: "Try again" }));
    await waitFor(() => expect(answers()[0]?.textContent).toContain("here"));
  });

  it("is cleared after a question, stays while one looks elsewhere, and follows its end (UI-10.5, UI-10.7, UI-10.10)", async () => {
    serve(fullResponse(contentEvent("kept")));
    const router = open();
    await type("Hello");
    await screen.findByRole("button", { name: "Regenerate" });
    expect(scrolled).toHaveBeenCalled();
    await router.navigate("/app/nodes");
    await screen.findByText("elsewhere");
    await router.navigate("/app/chat");
    expect(await screen.findByText("kept")).toBeTruthy();
    fireEvent.click(screen.getByRole("button", { name: "Clear…" }));
    fireEvent.click(within(screen.getByRole("alertdialog")).getByRole("button", { name: "Clear" }));
    expect(screen.queryByText("kept")).toBeNull();
  });

  it("leaves the reader where he scrolls up to, with a way to the end (UI-10.5)", async () => {
    const answer = new Open();
    serve(answer);
    open();
    await type("Hello");
    answer.send(contentEvent("one "));
    await screen.findByText("one");
    vi.spyOn(document.documentElement, "scrollHeight", "get").mockReturnValue(5000);
    const at = (top: number) => {
      vi.stubGlobal("scrollY", top);
      fireEvent.scroll(window);
    };
    at(4000);
    at(3000);
    const jump = await screen.findByRole("button", { name: "Jump to latest" });
    scrolled.mockClear();
    answer.send(contentEvent("two "));
    await screen.findByText("one two");
    expect(scrolled).not.toHaveBeenCalled();
    fireEvent.click(jump);
    expect(scrolled).toHaveBeenCalled();
    expect(screen.queryByRole("button", { name: "Jump to latest" })).toBeNull();
  });
});

describe("what is set", () => {
  it("goes with the question; what is wrong is shown at its field before anything is sent (UI-10.2)", async () => {
    const sent = serve(fullResponse(contentEvent("a")));
    open();
    const field = await screen.findByLabelText("Temperature");
    fireEvent.change(field, { target: { value: "hot" } });
    fireEvent.change(screen.getByLabelText("System prompt"), { target: { value: "Be brief." } });
    await type("Hello");
    expect(sent).toHaveLength(0);
    expect((await screen.findByText("Enter a number from 0 to 2.")).closest("details")?.open).toBe(true);
    fireEvent.change(field, { target: { value: "0.5" } });
    fireEvent.keyDown(await message(), { key: "Enter" });
    await waitFor(() => expect(sent).toHaveLength(1));
    expect(sent[0]?.body).toMatchObject({ model: "smol", temperature: 0.5, messages: [{ role: "system", content: "Be brief." }, { role: "user", content: "Hello" }] });
  });

  it("shows in the request that can be copied (UI-10.9)", async () => {
    open();
    await message();
    const code = screen.getByText("As curl and Python").closest("details");
    if (code === null) throw new Error("no code");
    expect(within(code).queryByText(/curl -N/)).toBeNull();
    code.open = true;
    fireEvent(code, new Event("toggle"));
    expect(within(code).getByText(/curl -N .*\/v1\/chat\/completions/s).textContent).toContain("$LOCALAI_API_KEY");
    expect(within(code).getByText(/from openai import OpenAI/)).toBeTruthy();
  });
});

it("shows the load of a model that is not there, as the feed tells it (E68, UI-10.8)", async () => {
  const load = {
    jobID: "j", id: "cold", kind: "model_load", fullName: "cold", name: "cold", status: "processing", seq: 1, progress: 40, taskType: "staging", isDeletion: false, isBackend: false,
    message: "sending b.bin to n1, file 2 of 3: 1 MiB of 4 MiB, 1 MiB/s, 3 s left", phase: "staging", attempts: 0, nextLookAt: "", createdAt: "2026-08-22T10:00:00Z", actor: "x", requestID: "", nodeName: "n1", currentBytes: 1024 ** 2, totalBytes: 4 * 1024 ** 2,
  } as unknown as Operation;
  serve();
  open("/app/chat?model=cold", FLEET_NODES, load);
  await type("Hello");
  const bar = await screen.findByRole("progressbar", { name: "Loading model cold" });
  expect(bar.getAttribute("aria-valuenow")).toBe("40");
  expect(answers()[0]?.textContent).toMatch(/to n1.*sending b\.bin to n1, file 2 of 3: 1 MiB of 4 MiB, 1 MiB\/s, 3 s left/s);
  expect(screen.getByText("loading")).toBeTruthy();
  expect(screen.queryByText("The first message loads this model.")).toBeNull();
});
