import { expect, it } from "vitest";
import { keptFilter, latestFilter } from "./back-link";

it("finds the list as it was left last", () => {
  const list = "http://a/app/nodes";
  const addresses = [`${list}?q=old`, `${list}?status=offline`, `${list}/1234?q=no`, null, "http://a/app/activity"];
  expect(latestFilter(addresses, "/app/nodes")).toBe("?status=offline");
  expect(latestFilter(["http://a/app/activity"], "/app/nodes")).toBe("");
});

it("does without a browser's help", () => {
  expect(keptFilter("/app/nodes")).toBe("");
});
