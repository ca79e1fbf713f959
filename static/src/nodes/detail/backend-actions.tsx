// The actions on one installed backend, in its row: upgrade and delete, each with a question that names what
// stops, how it goes, and why it failed.
import { useState, type ReactNode } from "react";
import { count } from "../../lib/format";
import type { LiveModel, LiveNode, Operation } from "../../live/messages";
import { isActive, needsAttention } from "../../live/store";
import { deleteOn, upgradeOn } from "../../operations/calls";
import { FailureActions, Reason } from "../../operations/failure";
import { NextCheck, SilenceNotice, WorkGlyph } from "../../operations/lines";
import { targetsOf } from "../../operations/model";
import { phaseOf, phrase, stateOf } from "../../operations/words";
import { announce } from "../../ui/announce";
import { ProgressBar } from "../../ui/bars";
import { Button } from "../../ui/button";
import { Confirm } from "../../ui/dialog";
import { refusal } from "../shared/verbs";
import type { Action } from "../../api/action";
import { useNodeAction } from "./data";
import { onBackend, usersOf } from "./words";

type Verb = "upgrade" | "delete";

interface BackendActionsProps {
  node: LiveNode;
  /** The backend's. */
  name: string;
  operations: readonly Operation[];
}

const LABEL: Readonly<Record<Verb, string>> = { upgrade: "Upgrade", delete: "Delete" };

export function BackendActions({ node, name, operations }: BackendActionsProps): ReactNode {
  const [dialog, setDialog] = useState<Verb | null>(null);
  const mine = operations.filter((operation) => onBackend(operation, name));
  const running = mine.find(isActive);
  const failed = mine.filter(needsAttention);
  const done = (verb: Verb) => () => {
    announce(`${LABEL[verb]} of ${name} requested.`);
    setDialog((present) => (present === verb ? null : present));
  };
  const actions: Readonly<Record<Verb, Action<string>>> = {
    upgrade: useNodeAction<string, unknown>(node.id, (backend) => upgradeOn(node.id, backend), done("upgrade")),
    delete: useNodeAction<string, unknown>(node.id, (backend) => deleteOn(node.id, backend), done("delete")),
  };
  const busy = running === undefined ? "" : `${phrase(running, stateOf(running))} ${name}`;
  return (
    <div className="nd-backend">
      <div className="row wrap">
        {(["upgrade", "delete"] as const).map((verb) => (
          <Button key={verb} small aria-label={`${LABEL[verb]} ${name}`} refusal={refusal("install", node) || busy} onClick={() => setDialog(verb)}>
            {LABEL[verb]}…
          </Button>
        ))}
      </div>
      {running !== undefined && <Progress operation={running} />}
      {failed.map((operation) => (
        <div key={operation.jobID} className="stack">
          <strong>{phrase(operation, "failed")}</strong>
          <Reason error={operation.error} name={name} />
          <FailureActions operations={[operation]} small />
        </div>
      ))}
      {dialog !== null && <ActionDialogs verb={dialog} node={node} name={name} action={actions[dialog]} onClose={() => setDialog(null)} />}
    </div>
  );
}

function Progress({ operation }: { operation: Operation }): ReactNode {
  const state = stateOf(operation);
  const value = targetsOf(operation)[0]?.value ?? 0;
  return (
    <>
      <div className="row wrap muted">
        <WorkGlyph state={state} />
        <span>{phrase(operation, state)}</span>
        <span>{phaseOf(operation)}</span>
        <NextCheck operation={operation} />
        <SilenceNotice of={operation} />
      </div>
      {state === "running" && <ProgressBar name={`${phrase(operation, state)} ${operation.name}`} value={value} />}
    </>
  );
}

interface ActionDialogsProps {
  verb: Verb;
  node: LiveNode;
  name: string;
  action: Action<string>;
  onClose: () => void;
}

function ActionDialogs({ verb, node, name, action, onClose }: ActionDialogsProps): ReactNode {
  const close = () => {
    action.forget();
    onClose();
  };
  return (
    <Confirm
      open
      danger={verb === "delete"}
      onClose={close}
      title={
        <>
          {LABEL[verb]} backend <bdi>{name}</bdi> on <bdi>{node.name}</bdi>
        </>
      }
      action={LABEL[verb]}
      busy={action.busy}
      error={action.error}
      onConfirm={() => action.run(name)}
    >
      <ul className="nd-effects">
        <Stops models={usersOf(node, name)} otherCount={node.models.length} />
        {verb === "upgrade" ? (
          <li>The backend is installed again from its gallery.</li>
        ) : (
          <li>The backend's files are removed from this node. The next load that needs the backend here installs it again.</li>
        )}
      </ul>
    </Confirm>
  );
}

/** The replicas that stop, by name: their requests end in the middle. */
function Stops({ models, otherCount }: { models: readonly LiveModel[]; otherCount: number }): ReactNode {
  const requests = models.reduce((sum, model) => sum + model.in_flight, 0);
  return (
    <>
      {models.length === 0 ? (
        <li>No replica on this node uses the backend under this name.</li>
      ) : (
        <li>
          {count(models.length, "replica")} with {count(requests, "request")} in flight {models.length === 1 ? "stops" : "stop"} immediately:
          <ul>
            {models.map((model) => (
              <li key={model.id}>
                <bdi>{model.model_name}</bdi>, replica {model.replica_index}
              </li>
            ))}
          </ul>
        </li>
      )}
      {otherCount > models.length && <li>Replicas that use the backend under another name, such as an alias, stop too.</li>}
      <li>The next request for one of their models loads the model again.</li>
    </>
  );
}
