// What cannot be taken back. Each says what it does to what runs now, and wants the node's word typed.
import { useEffect, useId, useRef, useState, type Dispatch, type ReactNode, type SetStateAction } from "react";
import { useNavigate, useNavigation } from "react-router";
import { count } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { Confirm } from "../../ui/dialog";
import { deregister, LONGEST_REASON, refusal, revoke, rotate, stop, type Verb } from "../shared/verbs";
import { useAction, type Action } from "./data";
import { Panel } from "./panel";
import { confirmationWord } from "./words";

export type Danger = Extract<Verb, "stop" | "deregister" | "revoke" | "rotate">;

interface Act {
  verb: Danger;
  title: string;
  /** In one line, beside the button. */
  short: string;
  action: Action<string>;
}

/** What can be asked for, with the words of its buttons. */
export const DANGERS: readonly (readonly [Danger, string])[] = [
  ["stop", "Stop worker"],
  ["rotate", "Rotate secret"],
  ["revoke", "Revoke secret"],
  ["deregister", "Deregister"],
];

interface ZoneProps {
  node: LiveNode;
  operations: number;
  /** The question that is open; the head of the page asks them as well. */
  dialog: Danger | null;
  onOpenDialog: Dispatch<SetStateAction<Danger | null>>;
}

export function DangerZone({ node, operations, dialog, onOpenDialog: setDialog }: ZoneProps): ReactNode {
  // Another question may be open when the answer to one comes.
  const acts = useActs(node, (verb) => setDialog((present) => (present === verb ? null : present)));
  const shown = acts.find((act) => act.verb === dialog);
  return (
    <Panel title="Danger zone" className="nd-danger">
      {acts.map((act) => (
        <div key={act.verb} className="row wrap spread">
          <div className="grow">
            <h3>{act.title}</h3>
            <p className="muted">{act.short}</p>
          </div>
          <Button kind="danger" refusal={refusal(act.verb, node)} onClick={() => setDialog(act.verb)}>
            {act.title}…
          </Button>
        </div>
      ))}
      {shown !== undefined && <DangerDialog key={shown.verb} act={shown} node={node} operations={operations} onClose={() => setDialog(null)} />}
    </Panel>
  );
}

function useActs(node: LiveNode, close: (verb: Danger) => void): readonly Act[] {
  const navigate = useNavigate();
  const navigationState = useRef("idle");
  const { state } = useNavigation();
  useEffect(() => {
    navigationState.current = state;
  });
  const { id, name } = node;
  const deregistration = useAction<string, unknown>(id, () => deregister(id), () => {
    announce(`${name} deregistered.`);
    // A person who has opened another page in the meantime stays there.
    if (navigationState.current === "idle" && window.location.pathname.toLowerCase().endsWith(`/${id}`)) void navigate("/app/nodes");
    return false;
  });
  const refused = useAction<string, unknown>(id, (reason) => revoke(id, reason), () => {
    announce(`Secret of ${name} revoked.`);
    close("revoke");
  });
  const renewed = useAction<string, unknown>(id, () => rotate(id), () => {
    announce(`Secret rotation requested for ${name}.`);
    close("rotate");
  });
  const stopped = useAction<string, unknown>(id, (reason) => stop(id, reason), () => {
    announce(`The worker of ${name} is being stopped.`);
    close("stop");
  });
  return [
    { verb: "stop", title: "Stop worker", short: "The worker drains itself and ends. It starts again only if its machine starts it.", action: stopped },
    { verb: "rotate", title: "Rotate secret", short: "The worker replaces its secret at next contact; no interruption.", action: renewed },
    { verb: "revoke", title: "Revoke secret", short: "Use if the secret has been compromised. It is permanently rejected.", action: refused },
    { verb: "deregister", title: "Deregister", short: "Removes the record. A running worker re-registers as a new, pending node.", action: deregistration },
  ];
}

interface DangerDialogProps {
  act: Act;
  node: LiveNode;
  operations: number;
  onClose: () => void;
}

function DangerDialog({ act, node, operations, onClose }: DangerDialogProps): ReactNode {
  const [reason, setReason] = useState("");
  const word = confirmationWord(node);
  const close = () => {
    act.action.forget();
    onClose();
  };
  return (
    <Confirm
      open
      danger
      onClose={close}
      title={
        <>
          {act.title}: <bdi>{node.name}</bdi>
        </>
      }
      action={act.title}
      typed={word}
      busy={act.action.busy}
      error={act.action.error}
      onConfirm={() => act.action.run(reason)}
    >
      <ul className="nd-effects">{effects(act.verb, node, operations)}</ul>
      {(act.verb === "revoke" || act.verb === "stop") && <Reason value={reason} where={act.verb === "stop" ? "kept with the operation" : "shown in the timeline"} onChange={setReason} />}
      {word !== node.name && <p className="muted">To confirm, type the first characters of the node ID, because the name is hard to type.</p>}
    </Confirm>
  );
}

function Reason({ value, where, onChange }: { value: string; where: string; onChange: (value: string) => void }): ReactNode {
  const id = useId();
  return (
    <label className="field" htmlFor={id}>
      <span>Reason ({where})</span>
      <input
        id={id}
        className="input"
        value={value}
        maxLength={LONGEST_REASON}
        autoComplete="off"
        onChange={(event) => onChange(event.target.value)}
      />
    </label>
  );
}

/** What happens, with the figures of now. */
function effects(verb: Danger, node: LiveNode, operations: number): ReactNode {
  if (verb === "rotate") {
    return (
      <>
        <li>Until the worker has replaced its secret, the old one is accepted only for registration and rotation.</li>
        <li>ID, approval and replicas stay. A stopped worker replaces its secret when it starts again.</li>
      </>
    );
  }
  const { length: replicas } = node.models;
  if (verb === "stop") {
    return (
      <>
        <li>
          {replicas === 0 ? "No replicas running" : `${count(replicas, "replica")} with ${count(node.in_flight_count, "request")} in flight ${replicas === 1 ? "stops" : "stop"}; running requests have a minute to end.`}
        </li>
        {operations > 0 && <li>{count(operations, "operation")} in progress on this node will wait for it.</li>}
        <li>The node stays registered and is offline. A service manager on the machine, such as systemd, may start the worker again.</li>
      </>
    );
  }
  const lost =
    replicas === 0 ? (
      <li>No replicas running</li>
    ) : (
      <li>
        {count(replicas, "replica")} with {count(node.in_flight_count, "request")} in flight {replicas === 1 ? "stops" : "stop"} immediately, without a drain.
      </li>
    );
  const pending = operations > 0 && <li>{count(operations, "operation")} in progress on this node will fail unless completed first.</li>;
  if (verb === "revoke") {
    return (
      <>
        {lost}
        {pending}
        <li>The secret is permanently rejected, under any name. The node loses its identity and needs a new approval.</li>
        <li>The worker keeps running and retries once a minute. Stop it, delete its file node-secret, start it, and approve it again.</li>
        {node.weak_identity && <li>The node is known by the shared token only. The token stays valid: anyone who has it can claim this name again.</li>}
      </>
    );
  }
  return (
    <>
      {lost}
      {pending}
      <li>Labels, overrides and conflicts{node.node_type === "agent" ? ", and the API user," : ""} are deleted with the record. The timeline stays.</li>
      <li>A running worker re-registers as a new, pending node. To keep it out, stop it, or revoke its secret instead.</li>
    </>
  );
}
