import { describe, expect, it } from "vitest";
import { ApiError } from "../api/client";
import { Runs } from "./runs";

function parked(): { runs: Runs; requests: (readonly string[])[]; answer: (error?: Error) => void } {
  const requests: (readonly string[])[] = [];
  let settle: (error?: Error) => void = () => undefined;
  const runs = new Runs((ids) => {
    requests.push(ids);
    return new Promise((resolve, reject) => {
      settle = (error) => (error === undefined ? resolve({ jobID: `job-${requests.length}` }) : reject(error));
    });
  });
  return { runs, requests, answer: (error) => settle(error) };
}

describe("requests of the picker", () => {
  it("are one request for all nodes: leaving the page loses none of them (review R2)", async () => {
    const { runs, requests, answer } = parked();
    const ids = Array.from({ length: 301 }, (_, n) => `n${n}`);
    const done = runs.start("echo", ids);
    expect(requests).toEqual([ids]);
    expect(runs.of("echo").get("n300")).toEqual({ step: "sending" });
    answer();
    await done;
    expect(new Set([...runs.of("echo").values()].map((sent) => sent.step === "accepted" && sent.jobID))).toEqual(new Set(["job-1"]));
    void runs.start("echo", ids.slice(0, 2));
    answer(new Error("no"));
    await expect.poll(() => runs.of("echo").get("n1")).toMatchObject({ step: "refused" });
    expect(runs.of("echo").get("n2")).toMatchObject({ step: "accepted" });
  });

  it("start nothing if nodes cannot take it: those say why, and the others are answered", async () => {
    const { runs, answer } = parked();
    const done = runs.start("echo", ["a", "b", "c"]);
    answer(new ApiError("node b is draining", 409, "ids", "", 0, "", {}, [], [{ id: "b", name: "b", reason: "node b is draining" }]));
    expect(await done).toEqual(["a", "c"]);
    expect([...runs.of("echo")].map(([id, sent]) => [id, sent.step === "refused" && sent.error.message])).toEqual([["b", "node b is draining"]]);
  });

  it("are known after the dialog was closed, together with what ran already", async () => {
    const { runs, answer } = parked();
    const done = runs.start("echo", ["a"]);
    runs.adopt("echo", [["a", "other"], ["b", "job-b"]]);
    expect(runs.of("echo").get("a")).toEqual({ step: "sending" });
    answer();
    await done;
    runs.adopt("echo", [["a", "job-1"], ["b", "newer"]]);
    expect([...runs.of("echo").values()]).toMatchObject([{ jobID: "job-1" }, { jobID: "newer" }]);
    runs.forget("echo", ["b"]);
    expect([...runs.of("echo").keys()]).toEqual(["a"]);
  });
});
