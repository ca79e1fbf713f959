// One decision of placement with its figures: what was needed, the best nodes with their terms, and the nearest misses.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import type { Column } from "../ui/rows";
import { Table } from "../ui/table";
import { Ago } from "../ui/time";
import { diskWords, memoryWords, needWords, quotaWords, signed, slotOf, type Best, type Choice, type Decision, type Miss } from "./explanation-query";

/** `kept`: when it was made, and when its figures were last read; null for one that is not kept. */
export function Details({ decision, recorded = null, name }: { decision: Decision; recorded?: Choice["recorded"]; name: string }): ReactNode {
  const { best, misses, need, nodes, selector } = decision;
  return (
    <div className="stack">
      <p className="muted anywhere">
        {nodes.feasible} of {count(nodes.considered, "node")} could take the replica. Needs: {needWords(need)}.
        {selector !== "" && (
          <>
            {" "}
            Only nodes with <bdi>{selector}</bdi>.
          </>
        )}
        {recorded !== null && recorded.lastAt !== recorded.at && (
          <>
            {" "}
            Figures are from <Ago at={recorded.lastAt} />.
          </>
        )}
      </p>
      {best.length > 0 && <BestNodes name={name} best={best} />}
      {misses.length > 0 && <Misses name={name} misses={misses} />}
    </div>
  );
}

const nodeOf = ({ node_id }: { node_id: string }) => node_id;
const yes = (value: boolean) => (value ? "yes" : "no");
const some = (value: boolean) => (value ? "some" : "none");

function BestNodes({ name, best }: { name: string; best: readonly Best[] }): ReactNode {
  return (
    <div>
      <h4>Best nodes</h4>
      <Table name={`Best nodes for ${name}`} columns={BEST} rows={best} rowId={nodeOf} rowName={slotOf} />
    </div>
  );
}

const BEST: readonly Column<Best>[] = [
  { key: "node", title: "Node", value: slotOf, cell: (best) => <NodeName id={best.node_id} text={slotOf(best)} /> },
  { key: "failures", title: "Failures", largestFirst: true, value: ({ terms }) => terms.failures, cell: ({ terms }) => terms.failures },
  { key: "shared", title: "Same group", value: ({ terms }) => yes(terms.shared), cell: ({ terms }) => yes(terms.shared) },
  { key: "memory", title: "Enough VRAM", value: ({ terms }) => yes(terms.has_memory), cell: ({ terms }) => yes(terms.has_memory) },
  { key: "replicas", title: "Replicas", value: ({ terms }) => some(terms.busy), cell: ({ terms }) => some(terms.busy) },
  { key: "flight", title: "In flight", largestFirst: true, value: ({ terms }) => terms.in_flight, cell: ({ terms }) => terms.in_flight },
  { key: "vram", title: "VRAM", largestFirst: true, value: ({ terms }) => terms.memory, cell: ({ terms }) => memoryWords(terms) },
  { key: "against", title: "Ranked lower because", value: ({ against }) => against ?? null, cell: ({ against }) => against !== undefined && <bdi>{against}</bdi> },
];

function Misses({ name, misses }: { name: string; misses: readonly Miss[] }): ReactNode {
  return (
    <div>
      <h4>Nodes that cannot take the replica</h4>
      <Table name={`Nearest misses for ${name}`} columns={misses.some(hasQuota) ? WITH_QUOTA : MISSES} rows={misses} rowId={nodeOf} rowName={({ node }) => node} />
    </div>
  );
}

const QUOTA: Column<Miss> = { key: "quota", title: "Quota used", largestFirst: true, value: ({ disk_quota = 0, quota_used = 0 }) => (disk_quota > 0 ? quota_used / disk_quota : null), cell: quotaWords };

const MISSES: readonly Column<Miss>[] = [
  { key: "node", title: "Node", value: ({ node }) => node, cell: ({ node_id, node }) => <NodeName id={node_id} text={node} /> },
  { key: "refusal", title: "Reason", value: ({ reason }) => reason, cell: ({ reason }) => <bdi>{reason}</bdi> },
  { key: "vram", title: "VRAM free", largestFirst: true, value: ({ free_vram }) => free_vram, cell: ({ free_vram }) => signed(free_vram) },
  { key: "disk", title: "Disk available", largestFirst: true, value: ({ available_disk, total_disk }) => (total_disk === 0 ? null : available_disk), cell: diskWords },
  { key: "replicas", title: "Replicas", largestFirst: true, value: ({ replicas }) => replicas, cell: ({ replicas, slots }) => `${replicas} of ${slots}` },
  { key: "flight", title: "In flight", largestFirst: true, value: ({ in_flight }) => in_flight, cell: ({ in_flight }) => in_flight },
];

const hasQuota = ({ disk_quota = 0 }: Miss) => disk_quota > 0;

/** With the quota of the models' files, if one of the nodes has it. */
const WITH_QUOTA: readonly Column<Miss>[] = MISSES.flatMap((column) => (column.key === "disk" ? [column, QUOTA] : [column]));

/** Decisions outlive the nodes that they name: only one that is there has a page. */
export function NodeName({ id, text }: { id: string; text: string }): ReactNode {
  const exists = useLive((state) => state.nodes.has(id));
  const name = <bdi>{text}</bdi>;
  return exists ? <Link to={`/app/nodes/${id}`}>{name}</Link> : name;
}
