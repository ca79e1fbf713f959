// The limits of a node: replicas of one model, VRAM, and disk space for models. Edited in place; an
// administrator's value is marked with who set it, and can be handed back to the worker.
import { useRef, type ReactNode } from "react";
import type { UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../../api/client";
import { bytes, count } from "../../lib/format";
import { useChange } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { goOnAt } from "../../ui/move-focus";
import { Problem } from "../../ui/problem";
import { Ago } from "../../ui/time";
import type { Action } from "../../api/action";
import { useNodeAction, type NodeDetail } from "./data";
import { budgetProblem, capProblem, ceiling, mostReplicas, quotaProblem } from "./editing";
import { InlineEdit } from "./inline-edit";
import { Panel } from "./panel";
import { provenance } from "./words";

interface CapacityProps {
  node: LiveNode;
  detail: UseQueryResult<NodeDetail>;
}

export function Capacity({ node, detail }: CapacityProps): ReactNode {
  return (
    <Panel title="Capacity">
      <ReplicaCap node={node} override={detail.data?.overrides.max_replicas_per_model} />
      {node.total_vram > 0 || node.vram_budget !== "" ? (
        <VramBudget node={node} override={detail.data?.overrides.vram_budget} />
      ) : (
        <div className="nd-fact">
          <h3>VRAM budget</h3>
          <p className="muted">The node reports no VRAM: there is nothing to limit.</p>
        </div>
      )}
      {node.node_type === "backend" && (
        <DiskQuota node={node} used={detail.data?.model_bytes} override={detail.data?.overrides.disk_quota} />
      )}
    </Panel>
  );
}

type Override = { by: string; at: string | null } | undefined;

const REPLICA_CAP = "/api/nodes/{node_id}/max-replicas-per-model";
type Path = typeof REPLICA_CAP | "/api/nodes/{node_id}/vram-budget" | "/api/nodes/{node_id}/disk-quota";

interface Limit {
  set: Action<string>;
  /** Hands the value back to the worker. */
  back: Action<undefined>;
}

/** The requests that set a limit of the node and reset it; `title` begins what is announced then. */
function useLimit(node: LiveNode, path: Path, title: string, saidReset = "reset to the worker default"): Limit {
  const params = { path: { node_id: node.id } };
  const set = useNodeAction<string, unknown>(
    node.id,
    (value) => call(client.PUT(path, { params, body: path === REPLICA_CAP ? { value: Number(value) } : { value } })),
    (_, value) => announce(value === "" ? `${title} removed.` : `${title} set to ${value}.`),
  );
  const back = useNodeAction<undefined, unknown>(
    node.id,
    () => call(client.DELETE(path, { params })),
    () => announce(`${title} ${saidReset}.`),
  );
  return { set, back };
}

/** What a typed limit of `total` bytes means. */
function meaningOf(text: string, total: number, unlimited: string): string {
  if (text.trim() === "") return `Leave empty for ${unlimited}.`;
  const limit = ceiling(text, total);
  return limit === null || total === 0 ? "" : `${bytes(limit)} of ${bytes(total)}.`;
}

function ReplicaCap({ node, override }: { node: LiveNode; override: Override }): ReactNode {
  const { set, back } = useLimit(node, REPLICA_CAP, "Maximum replicas per model");
  return (
    <Value
      title="Maximum replicas per model"
      manual={node.max_replicas_per_model_manually_set}
      override={override}
      back={back}
      handed="Reset. The worker's value applies from its next registration."
    >
      <InlineEdit
        name="maximum replicas per model"
        value={String(node.max_replicas_per_model)}
        check={capProblem}
        action={set}
        confirm={(value) => belowWhatRuns(node, Number(value))}
        numeric
      >
        {node.max_replicas_per_model}
      </InlineEdit>
    </Value>
  );
}

/** The warning before the cap goes below the running replicas. */
function belowWhatRuns(node: LiveNode, cap: number): ReactNode | null {
  const most = mostReplicas(node.models);
  if (most === null || cap >= most.count) return null;
  return (
    <p>
      <bdi>{most.model}</bdi> has {count(most.count, "replica")} on this node, more than {cap}. Running replicas stay until they are idle.
    </p>
  );
}

function VramBudget({ node, override }: { node: LiveNode; override: Override }): ReactNode {
  const { set, back } = useLimit(node, "/api/nodes/{node_id}/vram-budget", "VRAM budget");
  return (
    <Value
      title="VRAM budget"
      manual={node.vram_budget_manually_set}
      override={override}
      back={back}
      handed="Reset. Unlimited until the worker registers with a budget."
    >
      <InlineEdit
        name="VRAM budget"
        value={node.vram_budget}
        check={budgetProblem}
        action={set}
        meaning={(text) => meaningOf(text, node.total_vram, "unlimited")}
        placeholder="80% or 12GiB"
      >
        {node.vram_budget === "" ? <span className="muted">Unlimited</span> : <bdi>{node.vram_budget}</bdi>}
        {node.vram_budget_bytes > 0 && (
          <span className="muted">
            {" "}
            = {bytes(node.vram_budget_bytes)} of {bytes(node.total_vram)}
          </span>
        )}
      </InlineEdit>
    </Value>
  );
}

interface DiskQuotaProps {
  node: LiveNode;
  /** Bytes of the models on the node; undefined while they are read. */
  used: number | undefined;
  override: Override;
}

function DiskQuota({ node, used, override }: DiskQuotaProps): ReactNode {
  const { set, back } = useLimit(node, "/api/nodes/{node_id}/disk-quota", "Disk quota for models", "removed");
  return (
    <Value title="Disk quota for models" manual={node.disk_quota !== ""} override={override} back={back} handed="Removed. Only free disk space counts." plain="No limit by default" reset="Remove">
      <InlineEdit
        name="disk quota for models"
        value={node.disk_quota}
        check={quotaProblem}
        action={set}
        meaning={(text) => meaningOf(text, node.total_disk, "no limit")}
        placeholder="80% or 200GB"
      >
        {node.disk_quota === "" ? <span className="muted">No limit</span> : <bdi>{node.disk_quota}</bdi>}
        {used !== undefined && (
          <span className="muted">
            {" · "}
            {node.disk_quota_bytes > 0 ? `${bytes(used)} of ${bytes(node.disk_quota_bytes)} used` : `${bytes(used)} used`}
          </span>
        )}
      </InlineEdit>
    </Value>
  );
}

interface ValueProps {
  title: string;
  /** True if an administrator's value holds. */
  manual: boolean;
  override: Override;
  back: Action<undefined>;
  /** The result of the reset. */
  handed: string;
  /** The source of a value that nobody has set. */
  plain?: string;
  /** The action that ends an administrator's value. */
  reset?: string;
  children: ReactNode;
}

function Value({ title, manual, override, back, handed, plain, reset = "Reset to worker default", children }: ValueProps): ReactNode {
  const note = useRef<HTMLParagraphElement>(null);
  // The button that was pressed is gone: the focus goes to what came of it.
  useChange(manual, () => goOnAt(note.current));
  return (
    <div className="nd-fact">
      <h3>{title}</h3>
      <div className="stack">
        {children}
        <p className="row wrap nd-source">
          {manual && <span className="tag">override</span>}
          <span className="muted">
            {!manual && plain !== undefined ? plain : provenance(override, manual)}
            {manual && override?.at != null && (
              <>
                {" "}
                <Ago at={override.at} />
              </>
            )}
          </span>
          {manual && (
            <Button small busy={back.busy} aria-label={reset === "Remove" ? `Remove ${title}` : `Reset ${title} to worker default`} onClick={() => back.run(undefined)}>
              {reset}
            </Button>
          )}
        </p>
        {back.succeeded && !manual && (
          <p ref={note} className="muted" tabIndex={-1}>
            {handed}
          </p>
        )}
        <Problem error={back.error} onRetry={() => back.run(undefined)} onDismiss={back.forget} />
      </div>
    </div>
  );
}
