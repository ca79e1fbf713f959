import { expect, it } from "vitest";
import { addressProblem, isImage, keyOf } from "./address";

const NOTHING = { uri: "", name: "", alias: "" };

it.each([
  [{ uri: "/srv/mine" }, ""],
  [{ uri: "https://files.test/mine.tar.gz" }, ""],
  [{ uri: "ocifile:///srv/mine.tar" }, ""],
  [{ uri: "oci://images.test/mine:1", name: "mine", alias: "other" }, ""],
  [{}, "Enter an address."],
  [{ uri: "   " }, "Enter an address."],
  [{ uri: "mine" }, "Enter an image, a URL or a path that begins with /."],
  [{ uri: "oci://images.test/mine:1" }, "Enter a name. An image has no name of its own."],
  [{ uri: "images.test/mine:1" }, "Enter a name. An image has no name of its own."],
  [{ uri: "/srv/mine", name: "a b" }, "Use only letters, digits, dots, hyphens and underscores in the name."],
  [{ uri: "/srv/mine", alias: "-x" }, "Use only letters, digits, dots, hyphens and underscores in the name."],
])("an address says what it lacks: %o", (input, problem) => {
  expect(addressProblem({ ...NOTHING, ...input })).toBe(problem);
});

it("an archive's path is no image, and the name is what it is known by", () => {
  expect([isImage("mine-1.0/mine.tar.gz"), isImage("images.test:5000/mine@sha256:" + "a".repeat(64))]).toEqual([false, true]);
  expect([keyOf({ ...NOTHING, uri: "/srv/mine" }), keyOf({ ...NOTHING, uri: "/srv/mine", name: "own" })]).toEqual(["/srv/mine", "own"]);
});
