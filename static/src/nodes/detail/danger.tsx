// Actions that cannot be undone, as questions that the head's menu opens. Each shows its effect on the running work, and
// requires the node's word.
import { useEffect, useId, useRef, useState, type Dispatch, type ReactNode, type SetStateAction } from "react";
import { useNavigate, useNavigation } from "react-router";
import { ACTIONS } from "../../api/actions";
import { count } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Confirm } from "../../ui/dialog";
import { deregister, LONGEST_REASON, revoke, rotate, stop, type Verb } from "../shared/verbs";
import type { Action } from "../../api/action";
import { useNodeAction } from "./data";
import { confirmationWord } from "./words";

export type Danger = Extract<Verb, "stop" | "deregister" | "revoke" | "rotate">;

interface Act {
  verb: Danger;
  title: string;
  consequence: string;
  action: Action<string>;
}

/** The dangerous actions with their titles. */
export const DANGERS: readonly (readonly [Danger, string])[] = [
  ["stop", ACTIONS.stop.title],
  ["rotate", ACTIONS.rotate.title],
  ["revoke", ACTIONS.revoke.title],
  ["deregister", ACTIONS.remove.title],
];

interface QuestionsProps {
  node: LiveNode;
  operations: number;
  /** The open one. */
  dialog: Danger | null;
  onOpenDialog: Dispatch<SetStateAction<Danger | null>>;
}

/** Drawn as long as the page is open: an answer may come after its question is closed. */
export function DangerQuestions({ node, operations, dialog, onOpenDialog: setDialog }: QuestionsProps): ReactNode {
  // Another question may be open when the answer to one comes.
  const acts = useActs(node, (verb) => setDialog((present) => (present === verb ? null : present)));
  const shown = acts.find((act) => act.verb === dialog);
  return shown !== undefined && <DangerDialog key={shown.verb} act={shown} node={node} operations={operations} onClose={() => setDialog(null)} />;
}

function useActs(node: LiveNode, close: (verb: Danger) => void): readonly Act[] {
  const navigate = useNavigate();
  const navigationState = useRef("idle");
  const { state } = useNavigation();
  useEffect(() => {
    navigationState.current = state;
  });
  const { id, name } = node;
  const deregistration = useNodeAction<string, unknown>(id, () => deregister(id), () => {
    announce(`${name} deregistered.`);
    // A person who has opened another page in the meantime stays there.
    if (navigationState.current === "idle" && window.location.pathname.toLowerCase().split("/").includes(id)) void navigate("/app/nodes");
    return false;
  });
  const refused = useNodeAction<string, unknown>(id, (reason) => revoke(id, reason), () => {
    announce(`Secret of ${name} revoked.`);
    close("revoke");
  });
  const renewed = useNodeAction<string, unknown>(id, () => rotate(id), () => {
    announce(`Secret rotation requested for ${name}.`);
    close("rotate");
  });
  const stopped = useNodeAction<string, unknown>(id, (reason) => stop(id, reason), () => {
    announce(`The worker of ${name} is being stopped.`);
    close("stop");
  });
  return [
    { verb: "stop", ...ACTIONS.stop, action: stopped },
    { verb: "rotate", ...ACTIONS.rotate, action: renewed },
    { verb: "revoke", ...ACTIONS.revoke, action: refused },
    { verb: "deregister", ...ACTIONS.remove, action: deregistration },
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
      <p>{act.consequence}</p>
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

/** The consequences, with current figures. */
function effects(verb: Danger, node: LiveNode, operations: number): ReactNode {
  if (verb === "rotate") {
    return <li>ID, approval and replicas stay. A stopped worker replaces its secret when it starts again.</li>;
  }
  const { length: replicas } = node.models;
  if (verb === "stop") {
    return (
      <>
        <li>
          {replicas === 0 ? "No replicas running" : `${count(replicas, "replica")} with ${count(node.in_flight_count, "request")} in flight ${replicas === 1 ? "stops" : "stop"}; running requests have a minute to end.`}
        </li>
        {operations > 0 && <li>{count(operations, "operation")} in progress on this node will wait for the worker.</li>}
        <li>The node stays registered and is offline.</li>
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
        <li>The worker keeps running and retries once a minute. Stop it, delete its file node-secret, start it, and approve it again.</li>
        {node.weak_identity && <li>The node is known by the shared token only. The token stays valid: anyone who has it can claim this name again.</li>}
      </>
    );
  }
  return (
    <>
      {lost}
      {pending}
      <li>Labels, overrides and conflicts{node.node_type === "agent" ? ", and the API user," : ""} are deleted too.</li>
      <li>To keep a running worker out, stop it, or revoke its secret instead.</li>
    </>
  );
}
