// The actions on a model: load it, unload it, give it a rule; clone, disable or delete its definition.
import { Suspense, useMemo, useState, type ReactNode, type SubmitEvent } from "react";
import { useNavigate } from "react-router";
import { useAction } from "../api/action";
import { ApiError } from "../api/client";
import { chatAddress } from "../chat/models";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import { candidates } from "../scheduling/rules";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Confirm, Dialog } from "../ui/dialog";
import { lazyDialog } from "../ui/lazy";
import type { MenuItem } from "../ui/menu";
import { Problem } from "../ui/problem";
import { Checkbox, TextField } from "../ui/text-field";
import { loadModel, unloadModel } from "./data";
import { cloneDefinition, deleteDefinition, setDisabled, useDefinitionAction } from "./definitions";
import { canTalk, deleteRefusal, isIdle, loadRefusal, modelAddress, unloadRefusal, type ModelRow } from "./rows";

const RuleDialog = lazyDialog(async () => (await import("../scheduling/rule-dialog")).RuleDialog);

export type ModelVerb = "load" | "unload" | "rule" | "clone" | "disable" | "delete";

export interface ModelAction {
  verb: ModelVerb;
  row: ModelRow;
}

/** The menu of a model; `go` opens an address of the pages. */
export function menuOf(row: ModelRow, act: (action: ModelAction) => void, go: (address: string) => void): MenuItem[] {
  const { definition } = row;
  const undefinedHere = definition === undefined ? "not defined on this server" : "";
  const on = (verb: ModelVerb) => () => act({ verb, row });
  return [
    ...(canTalk(row) ? [{ label: "Chat", onSelect: () => go(chatAddress(row.name)) }] : []),
    { label: "Load…", refusal: loadRefusal(row), onSelect: on("load") },
    { label: "Unload all…", refusal: unloadRefusal(row), onSelect: on("unload") },
    ...(row.rule === undefined ? [{ label: "Add rule…", onSelect: on("rule") }] : []),
    { label: "Edit definition", refusal: undefinedHere, onSelect: () => go(modelAddress(row.name, "definition")) },
    { label: "Clone…", refusal: undefinedHere, onSelect: on("clone") },
    { label: definition?.state === "disabled" ? "Enable…" : "Disable…", refusal: undefinedHere || (definition?.origin === "file" ? "defined by a file in the models folder" : ""), onSelect: on("disable") },
    { label: "Delete…", danger: true, refusal: deleteRefusal(row), onSelect: on("delete") },
  ];
}

interface DialogProps {
  row: ModelRow;
  onClose: () => void;
}

interface ActionDialogProps {
  action: ModelAction;
  onClose: () => void;
  /** Called when the deletion has begun. */
  onDeleted?: () => void;
}

export function ActionDialog({ action: { verb, row }, onClose, onDeleted }: ActionDialogProps): ReactNode {
  switch (verb) {
    case "load":
      return <Load row={row} onClose={onClose} />;
    case "unload":
      return <UnloadAll row={row} onClose={onClose} />;
    case "clone":
      return <Clone row={row} onClose={onClose} />;
    case "disable":
      return <Disable row={row} onClose={onClose} />;
    case "delete":
      return <Delete row={row} onClose={onClose} {...(onDeleted === undefined ? {} : { onDeleted })} />;
    case "rule":
      return (
        <Suspense>
          <RuleDialog rule={null} model={row.name} onClose={onClose} />
        </Suspense>
      );
  }
}

const MOST_REPLICAS = 64;

/** On one node or wherever it fits, and how many. */
function Load({ row, onClose }: DialogProps): ReactNode {
  const [nodeName, setNodeName] = useState("");
  const [number, setNumber] = useState("1");
  const [sent, setSent] = useState(false);
  const present = useLive((state) => state.nodes);
  const nodes = useMemo(() => candidates(present.values()), [present]);
  const load = useAction(loadModel, `Load of ${row.name} requested.`);
  const node = nodes.find(({ name }) => name === nodeName.trim());
  const replicas = Number(number.trim());
  const isNumber = Number.isInteger(replicas) && replicas >= 1 && replicas <= MOST_REPLICAS;
  const isNode = nodeName.trim() === "" || node !== undefined;
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    setSent(true);
    if (!isNumber || !isNode || load.busy) return;
    // Without a choice the load joins one that is under way.
    const isPlain = node === undefined && replicas === 1 && isIdle(row);
    load.run({ model: row.name, ...(isPlain ? {} : { replicas }), ...(node === undefined ? {} : { node_id: node.id }) }, onClose);
  };
  return (
    <Dialog open onClose={onClose} title={<>Load <bdi>{row.name}</bdi></>} description={row.places.length > 0 ? `The model has ${count(row.places.length, "replica")}. This adds to them.` : "A replica starts on any node where it fits, unless you choose a node."}>
      <form className="stack" noValidate onSubmit={submit}>
        <TextField first label="Node" description="Empty: any node where it fits." suggestions={nodes.map(({ name }) => name)} value={nodeName} problem={sent && !isNode ? "No node with this name is in service." : ""} onChange={setNodeName} />
        <TextField label="Replicas" numeric value={number} problem={sent && !isNumber ? `Enter a whole number from 1 to ${MOST_REPLICAS}.` : ""} onChange={setNumber} />
        <Problem error={load.error} />
        <Buttons action="Load" busy={load.busy} onClose={onClose} />
      </form>
    </Dialog>
  );
}

function Buttons({ action, busy, onClose }: { action: string; busy: boolean; onClose: () => void }): ReactNode {
  return (
    <div className="row wrap">
      <Button type="submit" kind="primary" busy={busy}>
        {action}
      </Button>
      <Button onClick={onClose}>Cancel</Button>
    </div>
  );
}

function UnloadAll({ row, onClose }: DialogProps): ReactNode {
  const unload = useAction(() => unloadModel(row.name), `Unload of ${row.name} requested.`);
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
          {count(row.places.length, "replica")} {row.places.length === 1 ? "stops" : "stop"}. <InFlight row={row} />
        </li>
        <li>The next request loads the model again, and so does a scheduling rule with a minimum.</li>
      </ul>
    </Confirm>
  );
}

function InFlight({ row }: { row: ModelRow }): ReactNode {
  const flying = row.places.reduce((sum, { model }) => sum + model.in_flight, 0);
  return flying === 0 ? "No request is in flight." : `${count(flying, "request")} in flight may finish first, up to a deadline.`;
}

function Clone({ row, onClose }: DialogProps): ReactNode {
  const [name, setName] = useState(`${row.name}-copy`);
  const navigate = useNavigate();
  const clone = useDefinitionAction((newName: string) => cloneDefinition(row.name, newName), (made) => {
    announce(`${made.name} created.`);
    void navigate(modelAddress(made.name, "definition"));
  });
  const { error } = clone;
  // The server refuses to save over a revision that was not read.
  const isTaken = error instanceof ApiError && error.status === 409;
  const change = (typed: string) => {
    setName(typed);
    clone.forget();
  };
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (name.trim() !== "" && !clone.busy) clone.run(name.trim(), onClose);
  };
  return (
    <Dialog open onClose={onClose} title={<>Clone <bdi>{row.name}</bdi></>} description="The copy has the same files and settings, and no replicas.">
      <form className="stack" noValidate onSubmit={submit}>
        <TextField first label="Name of the copy" value={name} problem={name.trim() === "" ? "Enter a name." : isTaken ? "A model with this name exists." : ""} onChange={change} />
        <Problem error={isTaken ? null : error} />
        <Buttons action="Clone" busy={clone.busy} onClose={onClose} />
      </form>
    </Dialog>
  );
}

function Disable({ row, onClose }: DialogProps): ReactNode {
  const isDisabled = row.definition?.state === "disabled";
  const verb = isDisabled ? "Enable" : "Disable";
  const action = useDefinitionAction(() => setDisabled(row.name, !isDisabled), `${row.name} ${isDisabled ? "enabled" : "disabled"}.`);
  return (
    <Confirm open onClose={onClose} title={<>{verb} <bdi>{row.name}</bdi></>} action={verb} busy={action.busy} error={action.error} onConfirm={() => action.run(undefined, onClose)}>
      <p>{isDisabled ? "Requests can load the model again." : "New requests for the model are refused. Its definition and files stay."}</p>
      {!isDisabled && <Replicas row={row} />}
    </Confirm>
  );
}

const NAMED = 10;

/** The replicas in use, by node. */
function Replicas({ row }: { row: ModelRow }): ReactNode {
  if (row.places.length === 0) return <p>The model has no replicas.</p>;
  const names = row.places.slice(0, NAMED).map(({ node, model }) => `${node.name}#${model.replica_index}`);
  const rest = row.places.length - names.length;
  return (
    <p className="anywhere">
      In use: <bdi>{names.join(", ")}</bdi>
      {rest > 0 && ` and ${rest} more`}. <InFlight row={row} />
    </p>
  );
}

function Delete({ row, onClose, onDeleted }: DialogProps & Pick<ActionDialogProps, "onDeleted">): ReactNode {
  const [withFiles, setWithFiles] = useState(false);
  // The list follows with the operation.
  const action = useAction(() => deleteDefinition(row.name, withFiles), `Deletion of ${row.name} requested.`);
  const close = () => {
    onClose();
    onDeleted?.();
  };
  return (
    <Confirm open danger onClose={onClose} title={<>Delete <bdi>{row.name}</bdi></>} action="Delete" busy={action.busy} error={action.error} onConfirm={() => action.run(undefined, close)}>
      <p>The model's replicas are drained, then its definition is removed.</p>
      <Replicas row={row} />
      <Checkbox label="Also delete the model's files that no other definition names" on={withFiles} onChange={setWithFiles} />
    </Confirm>
  );
}
