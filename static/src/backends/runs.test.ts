import { describe, expect, it } from "vitest";
import { Runs } from "./runs";

function parked(): { runs: Runs; asked: string[]; answer: (id: string, error?: Error) => void } {
  const asked: string[] = [];
  const answers = new Map<string, (error?: Error) => void>();
  const runs = new Runs((id) => {
    asked.push(id);
    return new Promise((resolve, reject) => {
      answers.set(id, (error) => (error === undefined ? resolve({ jobID: `job-${id}` }) : reject(error)));
    });
  });
  return { runs, asked, answer: (id, error) => answers.get(id)?.(error) };
}

describe("requests of the picker", () => {
  it("go out together, eight at a time, and each stands for itself", async () => {
    const { runs, asked, answer } = parked();
    const ids = Array.from({ length: 10 }, (_, n) => `n${n}`);
    const done = runs.start("echo", ids);
    expect(asked).toHaveLength(8);
    answer("n0", new Error("no"));
    await Promise.resolve();
    for (const id of ids.slice(1, 8)) answer(id);
    await expect.poll(() => asked.length).toBe(10);
    answer("n8");
    answer("n9");
    await done;
    const run = runs.of("echo");
    expect(run.get("n0")).toMatchObject({ step: "refused" });
    expect(run.get("n9")).toMatchObject({ step: "accepted", jobID: "job-n9" });
  });

  it("are known after the dialog was closed, together with what ran already", async () => {
    const { runs, answer } = parked();
    const done = runs.start("echo", ["a"]);
    runs.adopt("echo", [["a", "other"], ["b", "job-b"]]);
    expect(runs.of("echo").get("a")).toEqual({ step: "sending" });
    answer("a");
    await done;
    runs.adopt("echo", [["a", "job-a"], ["b", "newer"]]);
    expect([...runs.of("echo").values()]).toMatchObject([{ jobID: "job-a" }, { jobID: "newer" }]);
    runs.forget("echo", ["b"]);
    expect([...runs.of("echo").keys()]).toEqual(["a"]);
  });
});
