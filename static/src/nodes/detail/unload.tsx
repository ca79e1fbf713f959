// The columns of replicas, with unloading one: a question that says what it costs, and how far it is while it ends.
import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { call, client } from "../../api/client";
import { count, formatTimeLeft } from "../../lib/format";
import { useNow } from "../../live/hooks";
import type { LiveModel } from "../../live/messages";
import type { Place } from "../../models/rows";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { Confirm } from "../../ui/dialog";
import type { Column } from "../../ui/rows";
import { StatusPill } from "../../ui/status";
import { Ago } from "../../ui/time";
import { logAddress } from "../logs/lines";
import { useNodeAction } from "./data";

/** Asks for it; the answer does not wait for the end, which the feed tells. */
function unload(nodeID: string, model: LiveModel): Promise<unknown> {
  const body = { model_name: model.model_name, replica_index: model.replica_index, wait: false };
  return call(client.POST("/api/nodes/{node_id}/models/unload", { params: { path: { node_id: nodeID } }, body }));
}

export const placeId = ({ model }: Place) => model.id;

/** The columns of every table of replicas. */
export const STATE: Column<Place> = {
  key: "state",
  title: "State",
  value: ({ model }) => model.state,
  cell: ({ model }) => (
    <>
      <StatusPill status={model.state} />
      <EndingReplica model={model} />
    </>
  ),
};
export const IN_FLIGHT: Column<Place> = { key: "flight", title: "In flight", numeric: true, largestFirst: true, value: ({ model }) => model.in_flight, cell: ({ model }) => model.in_flight };
export const LOGS: Column<Place> = {
  key: "logs",
  title: "Logs",
  cell: ({ node, model }) => (
    <Link to={logAddress(node.id, `${model.model_name}#${model.replica_index}`)} aria-label={`Logs of ${model.model_name}, replica ${model.replica_index}, on ${node.name}`}>
      Logs
    </Link>
  ),
};
export const ACTION: Column<Place> = { key: "action", title: "Action", cell: (place) => <Unload {...place} /> };

function Unload({ node, model }: Place): ReactNode {
  const [isDialogOpen, setIsDialogOpen] = useState(false);
  const name = `${model.model_name}, replica ${model.replica_index}`;
  const action = useNodeAction<LiveModel, unknown>(
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
  replaced: "the definition was edited",
  lost: "the replica did not respond",
  wrong_model: "the engine serves another model",
  load_failed: "the load failed",
};

/** What a replica that does not serve waits for, and how long at most. */
export function EndingReplica({ model }: { model: LiveModel }): ReactNode {
  const now = useNow(1000);
  const deadline = model.deadline ?? "";
  if (model.state !== "unloading") {
    return deadline === "" ? null : (
      <p className="nd-leaving muted">
        Abandoned <Ago at={deadline} /> at the latest
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
        May still run: {error}. Stopped again <Ago at={until} now="now" />.
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
