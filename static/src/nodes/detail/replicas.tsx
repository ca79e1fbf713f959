// The replicas of the node, in every state, from the feed.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../../lib/format";
import type { LiveModel, LiveNode } from "../../live/messages";
import { Empty } from "../../ui/empty";
import { StatusPill } from "../../ui/status";
import { Ago } from "../../ui/time";
import { logAddress } from "../logs/lines";
import { Panel } from "./panel";
import { EndingReplica, LogsAndUnload } from "./unload";

export function Replicas({ node }: { node: LiveNode }): ReactNode {
  const models = [...node.models].sort(byModel);
  const several = new Set(models.filter((model, at) => models[at - 1]?.model_name === model.model_name).map(({ model_name }) => model_name));
  return (
    <Panel
      title="Replicas"
      aside={
        <span className="row wrap">
          <span className="muted">{node.in_flight_count} in flight</span>
          {node.status !== "pending" && <Link to={logAddress(node.id)}>Logs</Link>}
        </span>
      }
    >
      {node.departed_engines > 0 && (
        <p className="nd-leaving">
          {count(node.departed_engines, "engine")} of former replicas may still run and {node.departed_engines === 1 ? "keeps its" : "keep their"} slot and
          memory until the end is confirmed, or <Ago at={node.departed_until ?? ""} /> at the latest.
        </p>
      )}
      {models.length === 0 ? (
        <Empty title="No replicas running">Models are loaded on request.</Empty>
      ) : (
        <div className="nd-scroll">
          <table className="nd-table">
            <thead>
              <tr>
                <th scope="col">Model</th>
                <th scope="col">State</th>
                <th scope="col" className="nd-number">
                  In flight
                </th>
                <th scope="col">Last used</th>
                <th scope="col">Backend</th>
                <th scope="col">Logs</th>
                <th scope="col">Action</th>
              </tr>
            </thead>
            <tbody>
              {models.map((model) => (
                <Row key={model.id} node={node} model={model} several={several.has(model.model_name)} />
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}

function byModel(left: LiveModel, right: LiveModel): number {
  return left.model_name.localeCompare(right.model_name) || left.replica_index - right.replica_index;
}

function Row({ node, model, several }: { node: LiveNode; model: LiveModel; several: boolean }): ReactNode {
  return (
    <tr>
      <th scope="row">
        <bdi>{model.model_name}</bdi> {several && <span className="tag">rep {model.replica_index}</span>}
      </th>
      <td data-label="State">
        <StatusPill status={model.state} />
        <EndingReplica model={model} />
      </td>
      <td data-label="In flight" className="nd-number">
        {model.in_flight}
      </td>
      <td data-label="Last used">
        <Ago at={model.last_used} />
      </td>
      <td data-label="Backend">
        <bdi>{model.backend_type || "unknown"}</bdi>
      </td>
      <LogsAndUnload node={node} model={model} />
    </tr>
  );
}
