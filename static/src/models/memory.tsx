// Which nodes have the memory for a model, before any load: what it needs term by term, and what would help where it lacks.
import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { bytes, count } from "../lib/format";
import { Button } from "../ui/button";
import { Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import type { Column } from "../ui/rows";
import { Table } from "../ui/table";
import { NodeName } from "./decision";
import { Disclosure } from "./explanation";
import type { Decision } from "./explanation-query";

export type MemoryExplained = components["schemas"]["MemoryExplained"];
type NodeMemory = components["schemas"]["NodeMemory"];

/** The verdicts on one model in its panel; they are read when it is opened. */
export function WhereItFits({ model }: { model: string }): ReactNode {
  return (
    <Disclosure label="Where it fits" subject={model}>
      {() => <Fits model={model} />}
    </Disclosure>
  );
}

function Fits({ model }: { model: string }): ReactNode {
  const { data, error, isFetching, isPending, refetch } = useQuery({
    queryKey: ["models", "memory", model],
    queryFn: ({ signal }) => call(client.GET("/api/placement/fit/{model}", { params: { path: { model } }, signal })),
  });
  const retry = () => void refetch();
  return (
    <div className="stack">
      {isPending && <Loading subject="memory" />}
      {error !== null && <Problem error={error} onRetry={retry} />}
      {data !== undefined && <Memory memory={data.memory} name={model} need={data.placement.need} />}
      {data !== undefined && (
        <div>
          <Button small kind="ghost" aria-label={`Refresh: memory for ${model}`} busy={isFetching} onClick={retry}>
            Refresh
          </Button>
        </div>
      )}
    </div>
  );
}

/** "16k", or "1000" where it is no multiple of 1,024. */
export function contextWords(tokens: number): string {
  return tokens > 0 && tokens % 1024 === 0 ? `${tokens / 1024}k` : String(tokens);
}

/** "weights 7.2 GiB, context 2 GiB, with 16k of context"; "" if nothing is known. */
export function termsWords({ terms, context }: Pick<MemoryExplained, "terms" | "context">): string {
  const sizes = Object.entries(terms);
  // The source of the need says that it is stated, or that what loads took beyond weights and context was measured.
  const parts = sizes.map(([name, size]) => (name === "stated" ? bytes(size) : `${name === "measured" && sizes.length > 1 ? "other" : name} ${bytes(size)}`));
  return [...parts, ...(context > 0 && parts.length > 0 ? [`with ${contextWords(context)} of context`] : [])].join(", ");
}

/** Where a need comes from that is not estimated; "" for an estimate. */
export function sourceWords({ source, readings = 0 }: Decision["need"]): string {
  if (source === "stated") return "Stated in the definition.";
  if (source !== "learned") return "";
  return readings > 1 ? `Measured in the last ${readings} loads.` : "Measured in the last load.";
}

/** Whether it fits there; `refused` has its own reason. */
export function verdictWords({ verdict, context }: Pick<NodeMemory, "verdict" | "context">): string {
  const words = { fits: "fits", smaller_context: `with ${contextWords(context)} of context`, lacks_memory: "does not fit", unknown: "not known", refused: "not possible" };
  return words[verdict];
}

/** What is missing and what would help, or the reason against the node. */
export function helpWords(entry: NodeMemory): string {
  if (entry.missing === 0) return entry.reason;
  const help = [...(entry.unload.length > 0 ? [`unload ${entry.unload.join(", ")}`] : []), ...(entry.context > 0 ? [`lower the context to ${contextWords(entry.context)}`] : [])];
  return [`${bytes(entry.missing)} missing`, ...(help.length > 0 ? [help.join(" or ")] : [])].join(": ");
}

const FITS: readonly Column<NodeMemory>[] = [
  { key: "node", title: "Node", value: ({ node }) => node, cell: ({ node_id, node }) => <NodeName id={node_id} text={node} /> },
  { key: "fits", title: "Fits", value: verdictWords, cell: verdictWords },
  { key: "needs", title: "Needs", largestFirst: true, value: ({ needed }) => needed || null, cell: ({ needed }) => (needed > 0 ? bytes(needed) : "not known") },
  {
    key: "free", title: "Free", largestFirst: true,
    value: (entry) => (isFreeKnown(entry) ? entry.usable : null), cell: freeWords,
  },
  { key: "help", title: "Details", value: (entry) => helpWords(entry) || null, cell: (entry) => <bdi>{helpWords(entry)}</bdi> },
];

function isFreeKnown({ usable, verdict }: NodeMemory): boolean {
  return usable > 0 || !["unknown", "refused"].includes(verdict);
}

function freeWords(entry: NodeMemory): string {
  if (isFreeKnown(entry)) return bytes(entry.usable);
  return entry.verdict === "unknown" ? "not reported" : "–";
}

interface MemoryProps {
  memory: MemoryExplained;
  name: string;
  /** Its source is shown. */
  need: Decision["need"] | undefined;
}

export function Memory({ memory, name, need }: MemoryProps): ReactNode {
  const rest = memory.considered - memory.nodes.length;
  const terms = termsWords(memory);
  const source = need === undefined ? "" : sourceWords(need);
  return (
    <div className="stack">
      <p className="muted anywhere">{terms === "" ? "The parts of the memory need are not known." : `Needs: ${terms}.`}</p>
      {source !== "" && <p className="muted">{source}</p>}
      {memory.nodes.length > 0 && <Table name={`Memory for ${name}`} columns={FITS} rows={memory.nodes} rowId={({ node_id }) => node_id} rowName={({ node }) => node} />}
      {rest > 0 && <p className="muted">{count(rest, "more node is", "more nodes are")} not shown.</p>}
    </div>
  );
}
