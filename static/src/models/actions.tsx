// The actions on a model: load it, unload it everywhere after a question, give it a rule.
import { useMutation } from "@tanstack/react-query";
import { Suspense, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { canChat, chatAddress } from "../chat/models";
import { count } from "../lib/format";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { lazyDialog } from "../ui/lazy";
import { Problem } from "../ui/problem";
import { loadModel, unloadModel } from "./data";
import { loadRefusal, unloadRefusal, type ModelRow } from "./rows";

const RuleDialog = lazyDialog(async () => (await import("../scheduling/rule-dialog")).RuleDialog);

/** `ruled`: the models that have a rule; null while that is not known. */
export function Actions({ row, ruled }: { row: ModelRow; ruled: readonly string[] | null }): ReactNode {
  const [dialog, setDialog] = useState<"" | "unload" | "rule">("");
  const load = useMutation({ mutationFn: () => loadModel(row.name), onSuccess: () => announce(`Load of ${row.name} requested.`) });
  const close = () => setDialog("");
  return (
    <div className="row wrap model-actions">
      {row.definition !== undefined && canChat(row.definition) && (
        <Link to={chatAddress(row.name)} aria-label={`Chat with ${row.name}`}>
          Chat
        </Link>
      )}
      <Button small aria-label={`Load ${row.name}`} busy={load.isPending} refusal={loadRefusal(row)} onClick={() => load.mutate()}>
        Load
      </Button>
      <Button small aria-label={`Unload all replicas of ${row.name}`} refusal={unloadRefusal(row)} onClick={() => setDialog("unload")}>
        Unload all…
      </Button>
      {ruled !== null && !ruled.includes(row.name) && (
        <Button small aria-label={`Add rule for ${row.name}`} onClick={() => setDialog("rule")}>
          Add rule…
        </Button>
      )}
      {load.error !== null && <Problem error={load.error} onDismiss={() => load.reset()} />}
      {dialog === "unload" && <UnloadAll row={row} onClose={close} />}
      <Suspense>{dialog === "rule" && <RuleDialog rule={null} model={row.name} ruled={ruled ?? []} onClose={close} />}</Suspense>
    </div>
  );
}

function UnloadAll({ row, onClose }: { row: ModelRow; onClose: () => void }): ReactNode {
  const unload = useMutation({
    mutationFn: () => unloadModel(row.name),
    onSuccess: () => announce(`Unload of ${row.name} requested.`),
  });
  const flying = row.places.reduce((sum, { model }) => sum + model.in_flight, 0);
  const nodes = new Set(row.places.map(({ node }) => node.id)).size;
  return (
    <Confirm
      open
      danger
      onClose={onClose}
      title={
        <>
          Unload <bdi>{row.name}</bdi> from {count(nodes, "node")}
        </>
      }
      action="Unload"
      busy={unload.isPending}
      error={unload.error}
      onConfirm={() => unload.mutate(undefined, { onSuccess: onClose })}
    >
      <ul className="nd-effects">
        <li>
          {count(row.places.length, "replica")} {row.places.length === 1 ? "stops" : "stop"}.{" "}
          {flying === 0 ? "No request is in flight." : `${count(flying, "request")} in flight may finish first, up to a deadline.`}
        </li>
        <li>The next request loads the model again. So does a rule with a minimum.</li>
      </ul>
    </Confirm>
  );
}
