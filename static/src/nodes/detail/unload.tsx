// Unloading one replica, in its row: a question that says what it costs, and how far it is while it leaves.
import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { call, client } from "../../api/client";
import { count, formatTimeLeft } from "../../lib/format";
import { useNow } from "../../live/hooks";
import type { LiveModel, LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { Confirm } from "../../ui/dialog";
import { Ago } from "../../ui/time";
import { logAddress } from "../logs/lines";
import { useAction } from "./data";

/** Asks for it; the answer does not wait for the end, which the feed tells. */
function unload(nodeID: string, model: LiveModel): Promise<unknown> {
  const body = { model_name: model.model_name, replica_index: model.replica_index, wait: false };
  return call(client.POST("/api/nodes/{node_id}/models/unload", { params: { path: { node_id: nodeID } }, body }));
}

/** The last cells of a replica's row, under "Logs" and "Action"; `where` ends the link's name in a table of several nodes. */
export function LogsAndUnload({ node, model, where = "" }: { node: LiveNode; model: LiveModel; where?: string }): ReactNode {
  const key = `${model.model_name}#${model.replica_index}`;
  return (
    <>
      <td data-label="Logs">
        <Link to={logAddress(node.id, key)} aria-label={`Logs of ${model.model_name}, replica ${model.replica_index}${where}`}>
          Logs
        </Link>
      </td>
      <td data-label="Action">
        <Unload node={node} model={model} />
      </td>
    </>
  );
}

function Unload({ node, model }: { node: LiveNode; model: LiveModel }): ReactNode {
  const [isDialogOpen, setIsDialogOpen] = useState(false);
  const name = `${model.model_name}, replica ${model.replica_index}`;
  const action = useAction<LiveModel, unknown>(
    node.id,
    (replica) => unload(node.id, replica),
    () => {
      announce(`Unload of ${name} requested.`);
      setIsDialogOpen(false);
    },
  );
  const close = () => {
    action.forget();
    setIsDialogOpen(false);
  };
  return (
    <>
      <Button small aria-label={`Unload ${name}, from ${node.name}`} refusal={refusal(model)} onClick={() => setIsDialogOpen(true)}>
        Unload…
      </Button>
      <Confirm
        open={isDialogOpen}
        danger
        onClose={close}
        title={
          <>
            Unload <bdi>{model.model_name}</bdi>, replica {model.replica_index}, from <bdi>{node.name}</bdi>
          </>
        }
        action="Unload"
        busy={action.busy}
        error={action.error}
        onConfirm={() => action.run(model)}
      >
        <ul className="nd-effects">
          <li>
            {model.in_flight === 0
              ? "No request is in flight. It stops immediately."
              : `${count(model.in_flight, "request")} in flight may finish before it stops, up to a deadline.`}
          </li>
          <li>New requests go to other replicas. Without one, the next request loads the model again.</li>
        </ul>
      </Confirm>
    </>
  );
}

/** Why it cannot be unloaded now. One whose worker did not confirm may be asked for again. */
function refusal(model: LiveModel): string {
  if (model.state === "loaded") return "";
  if (model.state === "unloading") return (model.cleanup_error ?? "") === "" ? "already unloading" : "";
  return "not loaded yet";
}

/** The reason why a replica ends without a requested unload. */
const REASONS: Partial<Record<NonNullable<LiveModel["reason"]>, string>> = {
  upgrade: "for an upgrade",
  evicted: "evicted by a load",
  replaced: "its definition was edited",
  lost: "it did not answer",
  wrong_model: "its engine serves another model",
  load_failed: "its load failed",
};

/** What a replica that does not serve waits for, and how long at most. */
export function EndingReplica({ model }: { model: LiveModel }): ReactNode {
  const now = useNow(1000);
  const deadline = model.deadline ?? "";
  if (model.state !== "unloading") {
    return deadline === "" ? null : (
      <p className="nd-leaving muted">
        Given up <Ago at={deadline} /> at the latest
      </p>
    );
  }
  const until = model.cleanup_next_retry_at ?? "";
  const error = model.cleanup_error ?? "";
  const reason = model.reason === undefined ? undefined : REASONS[model.reason];
  const why = reason === undefined ? "" : `, ${reason}`;
  if (error !== "") {
    return (
      <p className="nd-leaving">
        May still run: {error}. Stopped again <Ago at={until} />.
      </p>
    );
  }
  const seconds = (Date.parse(until) - now) / 1000;
  if (model.phase === "stopping" || model.in_flight === 0 || !(seconds > 0)) {
    return (
      <p className="nd-leaving muted">
        Stopping{why}
        {model.phase === "stopping" && deadline !== "" && <>, overdue <Ago at={deadline} /></>}
      </p>
    );
  }
  return (
    <p className="nd-leaving muted">
      Waiting for {count(model.in_flight, "request")}, {formatTimeLeft(seconds)} at most{why}
    </p>
  );
}
