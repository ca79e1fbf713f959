import { expect, it } from "vitest";
import { addressProblem, isImage, keyOf } from "./address";

const NOTHING = { uri: "", name: "", alias: "" };

const LETTERS = "Use only letters, digits, dots, hyphens and underscores in the name.";
const NAMELESS = { field: "name", text: "Enter a name. An image has no name of its own." };

it.each([
  [{ uri: "/srv/mine" }, null],
  [{ uri: "https://files.test/mine.tar.gz" }, null],
  [{ uri: "ocifile:///srv/mine.tar" }, null],
  [{ uri: "oci://images.test/mine:1", name: "mine", alias: "other" }, null],
  [{}, { field: "uri", text: "Enter an address." }],
  [{ uri: "   " }, { field: "uri", text: "Enter an address." }],
  [{ uri: "mine" }, { field: "uri", text: "Enter an image, a URL or a path that begins with /." }],
  [{ uri: "oci://images.test/mine:1" }, NAMELESS],
  [{ uri: "images.test/mine:1" }, NAMELESS],
  [{ uri: "/srv/mine", name: "a b" }, { field: "name", text: LETTERS }],
  [{ uri: "/srv/mine", alias: "-x" }, { field: "alias", text: LETTERS }],
])("an address says what it lacks: %o", (input, problem) => {
  expect(addressProblem({ ...NOTHING, ...input })).toEqual(problem);
});

it("an archive's path is no image, and the name is what it is known by", () => {
  expect([isImage("mine-1.0/mine.tar.gz"), isImage("images.test:5000/mine@sha256:" + "a".repeat(64))]).toEqual([false, true]);
  expect([keyOf({ ...NOTHING, uri: "/srv/mine" }), keyOf({ ...NOTHING, uri: "/srv/mine", name: "own" })]).toEqual(["/srv/mine", "own"]);
});
