// What runs on the node: its replicas, in every state, as the feed has them.
import type { ReactNode } from "react";
import type { LiveModel, LiveNode } from "../../live/messages";
import { Empty } from "../../ui/empty";
import { StatusPill } from "../../ui/status";
import { Ago } from "../../ui/time";
import { Panel } from "./panel";

export function Replicas({ node }: { node: LiveNode }): ReactNode {
  const models = [...node.models].sort(byModel);
  const several = new Set(models.filter((model, at) => models[at - 1]?.model_name === model.model_name).map(({ model_name }) => model_name));
  return (
    <Panel title="Replicas" aside={<span className="muted">{node.in_flight_count} in flight</span>}>
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
              </tr>
            </thead>
            <tbody>
              {models.map((model) => (
                <Row key={model.id} model={model} several={several.has(model.model_name)} />
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

function Row({ model, several }: { model: LiveModel; several: boolean }): ReactNode {
  return (
    <tr>
      <th scope="row">
        <bdi>{model.model_name}</bdi> {several && <span className="tag">rep {model.replica_index}</span>}
      </th>
      <td data-label="State">
        <StatusPill status={model.state} />
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
    </tr>
  );
}
