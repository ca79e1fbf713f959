// The replicas of the node, in every state, from the feed.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../../lib/format";
import type { LiveModel, LiveNode } from "../../live/messages";
import type { Place } from "../../models/rows";
import { Empty } from "../../ui/empty";
import type { Column } from "../../ui/rows";
import { Table } from "../../ui/table";
import { Ago } from "../../ui/time";
import { Panel } from "./panel";
import { ACTION, IN_FLIGHT, LOGS, placeId, STATE } from "./unload";

export function Replicas({ node }: { node: LiveNode }): ReactNode {
  const models = [...node.models].sort(byModel);
  const several = new Set(models.filter((model, at) => models[at - 1]?.model_name === model.model_name).map(({ model_name }) => model_name));
  return (
    <Panel
      title="Replicas"
      aside={<span className="muted">{node.in_flight_count} in flight</span>}
    >
      {node.departed_engines > 0 && (
        <p className="nd-leaving">
          {count(node.departed_engines, "engine")} of former replicas may still run and {node.departed_engines === 1 ? "keeps its" : "keep their"} slot and
          memory until the end is confirmed, or <Ago at={node.departed_until ?? ""} /> at the latest.
        </p>
      )}
      {models.length === 0 ? (
        <Empty title="No replicas running">
          Models are loaded on request.
          <Link className="button" to="/app/models">
            Open Models
          </Link>
        </Empty>
      ) : (
        <div className="table-scroll">
          <Table name="Replicas" columns={COLUMNS} rows={models.map((model) => ({ node, model, several: several.has(model.model_name) }))} rowId={placeId} rowName={({ model }) => model.model_name} />
        </div>
      )}
    </Panel>
  );
}

function byModel(left: LiveModel, right: LiveModel): number {
  return left.model_name.localeCompare(right.model_name) || left.replica_index - right.replica_index;
}

const COLUMNS: readonly Column<Place & { several: boolean }>[] = [
  {
    key: "model",
    title: "Model",
    value: ({ model }) => model.model_name,
    cell: ({ model, several }) => (
      <>
        <bdi>{model.model_name}</bdi> {several && <span className="tag">rep {model.replica_index}</span>}
      </>
    ),
  },
  STATE,
  IN_FLIGHT,
  { key: "used", title: "Last used", value: ({ model }) => model.last_used, cell: ({ model }) => <Ago at={model.last_used} /> },
  { key: "backend", title: "Backend", value: ({ model }) => model.backend_type, cell: ({ model }) => <bdi>{model.backend_type || "unknown"}</bdi> },
  LOGS,
  ACTION,
];
