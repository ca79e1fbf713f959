// The actions on a model: load it, unload it everywhere after a question, give it a rule.
import { Suspense, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { useAction } from "../api/action";
import { canChat, chatAddress } from "../chat/models";
import { count } from "../lib/format";
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
  const load = useAction(() => loadModel(row.name), `Load of ${row.name} requested.`);
  const close = () => setDialog("");
  return (
    <div className="row wrap model-actions">
      {row.definition !== undefined && canChat(row.definition) && (
        <Link to={chatAddress(row.name)} aria-label={`Chat with ${row.name}`}>
          Chat
        </Link>
      )}
      <Button small aria-label={`Load ${row.name}`} busy={load.busy} refusal={loadRefusal(row)} onClick={() => load.run()}>
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
      <Problem error={load.error} onDismiss={load.forget} />
      {dialog === "unload" && <UnloadAll row={row} onClose={close} />}
      <Suspense>{dialog === "rule" && <RuleDialog rule={null} model={row.name} ruled={ruled ?? []} onClose={close} />}</Suspense>
    </div>
  );
}

function UnloadAll({ row, onClose }: { row: ModelRow; onClose: () => void }): ReactNode {
  const unload = useAction(() => unloadModel(row.name), `Unload of ${row.name} requested.`);
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
      busy={unload.busy}
      error={unload.error}
      onConfirm={() => unload.run(undefined, onClose)}
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
