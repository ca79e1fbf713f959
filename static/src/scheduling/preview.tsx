// The preview of a rule while it is typed: the server decides as its next pass would and changes nothing. It is requested
// when typing pauses, and only for a rule that can be sent.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { type ReactNode } from "react";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { useDebounced } from "../lib/debounced";
import { count } from "../lib/format";
import { Problem } from "../ui/problem";
import { bodyOf, validateDraft, type Draft } from "./rules";

type Miss = components["schemas"]["PlacementMiss"];
type Step = components["schemas"]["NodeWithReason"];

/** The server's preview of a rule that is not saved. */
export type RulePlan = components["schemas"]["RulePlan"];

const ASK_AFTER_MS = 400;

export function Preview({ draft }: { draft: Draft }): ReactNode {
  const paused = useDebounced(draft, ASK_AFTER_MS);
  const isValid = Object.keys(validateDraft(paused)).length === 0;
  const { data, error, refetch, isFetching } = useQuery({
    queryKey: ["scheduling", "preview", bodyOf(paused)],
    queryFn: async ({ signal }) => (await call(client.POST("/api/placement/plan", { body: { rule: bodyOf(paused) }, signal }))) as RulePlan,
    enabled: isValid,
    placeholderData: keepPreviousData,
    gcTime: 0,
    retry: false,
  });
  if (!isValid) return null;
  return (
    <section className="rule-preview" aria-label="Preview of the rule" aria-busy={isFetching || draft !== paused}>
      <h3>Preview</h3>
      <Problem error={error} onRetry={() => void refetch()} />
      {error === null && data !== undefined && <PlanSummary plan={data} />}
      {error === null && data === undefined && <p className="muted">Loading the preview…</p>}
    </section>
  );
}

function PlanSummary({ plan }: { plan: RulePlan }): ReactNode {
  const { replicas_now: now, wanted, loads, retires, unsatisfiable, misses } = plan;
  return (
    <div className="stack">
      <p role="status">
        {count(now, "replica")} now, {wanted} wanted.
        {loads.length === 0 && retires.length === 0 && unsatisfiable === null && " No changes needed."}
      </p>
      <Steps title="Loads" steps={loads} />
      <Steps title="Retires" steps={retires} />
      {unsatisfiable !== null && (
        <div className="risk">
          <p className="anywhere">
            ⚠ The rule cannot be met now: <bdi>{unsatisfiable.reason}</bdi>
          </p>
          <p>{countsIn(unsatisfiable.counts, misses)}</p>
        </div>
      )}
      {misses.length > 0 && (
        <ul className="rule-steps" aria-label="Nearest misses">
          {misses.map((miss) => (
            <li key={miss.node_id}>
              Not on <bdi>{miss.node}</bdi>: <bdi>{miss.reason}</bdi>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

function Steps({ title, steps }: { title: string; steps: readonly Step[] }): ReactNode {
  if (steps.length === 0) return null;
  return (
    <div>
      <h4>
        {title} {steps.length}
      </h4>
      <ul className="rule-steps" aria-label={title}>
        {steps.map(({ node, why }, at) => (
          <li key={`${node} ${at}`} className="anywhere">
            <bdi>
              <b>{node}</b>
            </bdi>
            : <bdi>{why}</bdi>
          </li>
        ))}
      </ul>
    </div>
  );
}

/** "3 nodes: no free slot; 1 node: offline". Codes are in the words of a miss that has the same one. */
export function countsIn(counts: NonNullable<RulePlan["unsatisfiable"]>["counts"], misses: readonly Pick<Miss, "code" | "reason">[]): string {
  return Object.entries(counts)
    .map(([code, many]) => `${count(many, "node")}: ${misses.find((miss) => miss.code === code)?.reason ?? code}`)
    .join("; ");
}
