import { expect, it } from "vitest";
import { Runs } from "./runs";

it("a request whose answer was lost is followed as soon as its operation shows", async () => {
  const runs = new Runs(() => Promise.reject(new Error("The server is unreachable.")));
  await runs.start("echo", ["a"]);
  expect(runs.of("echo").get("a")).toMatchObject({ step: "refused" });
  runs.adopt("echo", [["a", "job-a"]]);
  expect(runs.of("echo").get("a")).toMatchObject({ step: "accepted", jobID: "job-a" });
});
