import { describe, expect, it } from "vitest";
import { ApiError } from "../api/client";
import { node } from "../live/fixtures";
import { BLANK, bodyOf, candidates, cooldown, demand, draftOf, labelKeys, labelValues, matching, matchWords, refusedField, selectorIn, selectorOf, ruleState, validateDraft, type Rule } from "./rules";

const NOW = Date.parse("2026-08-22T10:00:00Z");
const AT = "2026-08-22T09:59:50Z";

function rule(overrides: Partial<Rule> = {}): Rule {
  return { id: "1", model_name: "m", min_replicas: 1, max_replicas: 0, unsatisfiable_ticks: 0, created_at: AT, updated_at: AT, ...overrides };
}

function state(desired: number, current: number, loading: number): NonNullable<Rule["state"]> {
  return { wanted: desired, current, loading, reason: "because", at: AT };
}

describe("the selector (UW11)", () => {
  const nodes = [
    node("b", { labels: { tier: "fast", zone: "" } }),
    node("a", { labels: { tier: "fast", zone: "x" } }),
    node("c", { labels: { tier: "slow" } }),
    node("new", { status: "pending", labels: { tier: "fast", secret: "1" } }),
    node("agent", { node_type: "agent", labels: { tier: "fast" } }),
  ];

  it.each<[string | undefined, ReturnType<typeof selectorOf>]>([
    [undefined, {}],
    ['{"tier":"fast"}', { tier: "fast" }],
    ['{"tier":1}', null],
    ["[]", null],
    ["null", null],
    ["{", null],
  ])("is read from its text %s", (text, expected) => {
    expect(selectorOf(text === undefined ? {} : { node_selector: text })).toEqual(expected);
  });

  it("is matched against approved workers only, by all of its labels", () => {
    const among = candidates(nodes);
    expect(among.map((node) => node.name)).toEqual(["a", "b", "c"]);
    expect(matching(among, { tier: "fast" }).map((node) => node.name)).toEqual(["a", "b"]);
    expect(matching(among, { tier: "fast", zone: "" }).map((node) => node.name)).toEqual(["b"]);
    expect(matching(among, {})).toHaveLength(3);
    expect(matching(among, { toString: "x" })).toEqual([]);
  });

  it("says how many match, and which", () => {
    const among = candidates(nodes);
    expect(matchWords(matching(among, { tier: "fast" }), 3)).toBe("Matches 2 of 3 nodes: a, b");
    expect(matchWords([], 3)).toBe("Matches 0 of 3 nodes");
    const many = Array.from({ length: 12 }, (_, number) => node(`n${number}`));
    expect(matchWords(many, 12)).toMatch(/: n0, .*n9 and 2 more$/);
  });

  it("is suggested from what approved nodes have", () => {
    const among = candidates(nodes);
    expect(labelKeys(among)).toEqual(["tier", "zone"]);
    expect(labelValues(among, "zone")).toEqual(["", "x"]);
    expect(labelValues(among, "toString")).toEqual([]);
  });
});

describe("how a rule is (UW10)", () => {
  it.each<[string, Partial<Rule>]>([
    ["restricts nodes only", { min_replicas: 0 }],
    ["not checked yet", {}],
    ["satisfied", { state: state(1, 1, 0) }],
    ["loading", { state: state(2, 1, 1) }],
    ["too few replicas", { state: state(2, 1, 0) }],
    ["cooling down", { state: state(2, 1, 0), unsatisfiable_until: "2026-08-22T10:05:00Z" }],
    ["too few replicas", { state: state(2, 1, 0), unsatisfiable_until: AT }],
  ])("%s", (word, overrides) => expect(ruleState(rule(overrides), NOW).word).toBe(word));

  it("a cooldown counts down to nothing", () => {
    const cooling = rule({ unsatisfiable_until: "2026-08-22T10:05:00Z" });
    expect([cooldown(cooling, NOW), cooldown(cooling, NOW + 600_000), cooldown(rule(), NOW)]).toEqual([300, 0, 0]);
  });

  it.each<[string, Partial<Rule>]>([
    ["at least 1", {}],
    ["1 to 3", { max_replicas: 3 }],
    ["exactly 2", { min_replicas: 2, max_replicas: 2 }],
    ["up to 3", { min_replicas: 0, max_replicas: 3 }],
    ["one on every matching node", { min_replicas: 0, spread_all: true }],
    ["any number, on request", { min_replicas: 0 }],
  ])("asks for %s", (words, overrides) => expect(demand(rule(overrides))).toBe(words));
});

describe("what is typed (E41)", () => {
  const fullRule = rule({
    node_selector: '{"tier":"fast"}', max_replicas: 3, route_policy: "prefix_cache", min_prefix_match: 0.4, balance_abs_threshold: 3, balance_rel_threshold: 1.5,
  });

  it("is the rule, and becomes it again", () => {
    expect(bodyOf(draftOf(fullRule))).toEqual({
      model_name: "m", node_selector: { tier: "fast" }, spread_all: false, min_replicas: 1, max_replicas: 3,
      route_policy: "prefix_cache", min_prefix_match: 0.4, balance_abs_threshold: 3, balance_rel_threshold: 1.5,
    });
  });

  it("clears a routing field by naming it, and the counts of one that spreads", () => {
    const body = bodyOf({ ...draftOf(fullRule), policy: "", prefix: "", spread: true });
    expect(body).toMatchObject({ route_policy: "", min_prefix_match: 0, spread_all: true, min_replicas: 0, max_replicas: 0 });
  });

  it("counts a label that is not added yet", () => {
    expect(selectorIn({ ...BLANK, selector: { a: "1" }, key: " b ", value: "" })).toEqual({ a: "1", b: "" });
    expect(selectorIn({ ...BLANK, selector: { a: "1" }, key: " ", value: "x" })).toEqual({ a: "1" });
  });

  it("is told where it cannot be sent", () => {
    expect(Object.keys(validateDraft(BLANK))).toEqual(["model_name"]);
    expect(Object.keys(validateDraft({ ...BLANK, model: "m", min: "1.5", max: "-1", relative: "x" }))).toEqual(["min_replicas", "max_replicas", "balance_rel_threshold"]);
    expect(validateDraft({ ...BLANK, model: "m", min: "many", spread: true })).toEqual({});
  });

  it.each([
    [{ min: "5", max: "2" }, { min_replicas: "Enter at most the maximum, 2." }],
    [{ min: "5", max: "0" }, {}],
    [{ min: "5", max: "" }, {}],
    [{ min: "5", max: "2", spread: true }, {}],
    [{ prefix: "1.5" }, { min_prefix_match: "Enter 0 to 1, or leave it empty." }],
    [{ relative: "0.5" }, { balance_rel_threshold: "Enter at least 1, or leave it empty." }],
    [{ relative: "0", prefix: "1" }, {}],
  ])("impossible values %o are explained in the words of the form", (values, problems) => {
    expect(validateDraft({ ...BLANK, model: "m", ...values })).toEqual(problems);
  });

  it("a refusal goes to its field; any other failure to none", () => {
    expect(refusedField(new ApiError("min_replicas must be …", 400, "min_replicas"))).toEqual({ field: "min_replicas", words: "min_replicas must be …" });
    expect(refusedField(new ApiError("odd", 400, "nonsense"))).toBeNull();
    expect(refusedField(new ApiError("down", 503, "min_replicas"))).toBeNull();
  });
});
