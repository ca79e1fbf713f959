import { expect, it } from "vitest";
import { byJob, install } from "./fixtures";
import { groups } from "./model";
import { subjectOf } from "./summary";

it("a worker's whole log is told by its beginning where there is one line for it", () => {
  const [group] = groups(byJob(install("a", { status: "failed", error: "E".repeat(60_000) })).values(), new Map());
  expect(group && subjectOf(group).length).toBeLessThan(400);
});
