// The dialogs of the verbs, for one node or many. Each is mounted when it is asked for and sends what the reader
// saw; see `verb-dialog.tsx` for what they share.
import { useId, useState, type ReactNode } from "react";
import { ACTIONS } from "../../api/actions";
import { count, grouped } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { TextField } from "../../ui/text-field";
import { IdentityFacts, Risk, RISK, WEAK_RISK } from "./identity";
import { isAutomatic, keyProblem, valueProblem, written } from "./labels";
import { VerbDialog, type NodesDialogProps } from "./verb-dialog";
import * as verbs from "./verbs";

/** Lets pending nodes in, by the fingerprint that is shown. */
export function ApproveDialog({ nodes, onClose }: NodesDialogProps): ReactNode {
  const alone = nodes.length === 1;
  const details = (node: LiveNode) =>
    node.weak_identity ? <span className="pill warn">shared token only</span> : <code>{grouped(node.fingerprint)}</code>;
  return (
    <VerbDialog
      action="Approve"
      done="approved"
      nodes={nodes}
      onClose={onClose}
      refuse={(node) => verbs.refusal("approve", node)}
      {...(alone ? {} : { details })}
      work={async (node) => (await verbs.approve(node.id, node.fingerprint)).api_token}
      workOnAll={(targets) => verbs.onAll("approve", targets, { fingerprints: fingerprints(targets) })}
    >
      {(shownNodes) => (alone ? shownNodes.map((node) => <Alone key={node.id} node={node} />) : <Risks nodes={shownNodes} />)}
    </VerbDialog>
  );
}

/** The fingerprint of each node that has one. */
function fingerprints(nodes: readonly LiveNode[]): Record<string, string> {
  return Object.fromEntries(nodes.filter((node) => node.fingerprint !== "").map((node) => [node.id, node.fingerprint]));
}

function Alone({ node }: { node: LiveNode }): ReactNode {
  return (
    <>
      <IdentityFacts node={node} />
      <Risk node={node} />
    </>
  );
}

function Risks({ nodes }: { nodes: readonly LiveNode[] }): ReactNode {
  return (
    <>
      {nodes.some((node) => !node.weak_identity) && <p className="risk">{RISK}</p>}
      {nodes.some((node) => node.weak_identity) && <p className="risk">Nodes marked “shared token only”: {WEAK_RISK}</p>}
    </>
  );
}

/** Says no to pending nodes, with a reason. */
export function RejectDialog({ nodes, onClose }: NodesDialogProps): ReactNode {
  const [reason, setReason] = useState("");
  return (
    <VerbDialog
      action="Reject"
      done="rejected"
      danger
      nodes={nodes}
      onClose={onClose}
      refuse={(node) => verbs.refusal("reject", node)}
      problem={reason.trim() === "" ? "Enter a reason" : tooLong(reason)}
      work={(node) => verbs.reject(node.id, reason)}
      workOnAll={(targets) => verbs.onAll("reject", targets, { reason })}
    >
      <p>{ACTIONS.reject.consequence}</p>
      <ReasonField value={reason} onChange={setReason} />
    </VerbDialog>
  );
}

/** Drains nodes; with fields for the reason and the deadline of running requests. */
export function DrainDialog({ nodes, onClose }: NodesDialogProps): ReactNode {
  const [reason, setReason] = useState("");
  const [minutes, setMinutes] = useState("");
  const deadline = minutes.trim() === "" ? null : Number(minutes);
  const problem = deadlineProblem(deadline);
  return (
    <VerbDialog
      action="Drain"
      done="set to draining"
      danger
      nodes={nodes}
      onClose={onClose}
      refuse={(node) => verbs.refusal("drain", node)}
      problem={problem || tooLong(reason)}
      details={running}
      work={(node) => verbs.drain(node.id, reason, deadline)}
      workOnAll={(targets) => verbs.onAll("drain", targets, { reason, ...(deadline === null ? {} : { deadline_seconds: Math.round(deadline * 60) }) })}
    >
      <p>{ACTIONS.drain.consequence}</p>
      <ReasonField value={reason} onChange={setReason} />
      <MinutesField value={minutes} onChange={setMinutes} problem={problem} />
    </VerbDialog>
  );
}

function running(node: LiveNode): ReactNode {
  if (node.model_count === 0) return <span className="muted">no models loaded</span>;
  return (
    <span className="muted">
      {count(node.model_count, "replica")}, {count(node.in_flight_count, "request")} in flight
    </span>
  );
}

/** The problem with a deadline in minutes; "" if there is none. */
export function deadlineProblem(minutes: number | null): string {
  if (minutes === null) return "";
  const fits = minutes >= 0 && minutes <= verbs.LONGEST_DEADLINE_MINUTES;
  return fits ? "" : `Enter 0 to ${verbs.LONGEST_DEADLINE_MINUTES} minutes.`;
}

function tooLong(reason: string): string {
  return reason.length > verbs.LONGEST_REASON ? `At most ${verbs.LONGEST_REASON} characters` : "";
}

/** Takes nodes into service again. */
export function ResumeDialog({ nodes, onClose }: NodesDialogProps): ReactNode {
  return (
    <VerbDialog
      action="Resume"
      done="resumed"
      nodes={nodes}
      onClose={onClose}
      refuse={(node) => verbs.refusal("resume", node)}
      work={(node) => verbs.resume(node.id)}
      workOnAll={(targets) => verbs.onAll("resume", targets)}
    >
      <p>{ACTIONS.resume.consequence}</p>
    </VerbDialog>
  );
}

/** Removes the records of nodes. */
export function RemoveDialog({ nodes, onClose }: NodesDialogProps): ReactNode {
  return (
    <VerbDialog
      action="Remove"
      done="removed"
      danger
      nodes={nodes}
      onClose={onClose}
      refuse={(node) => verbs.refusal("deregister", node)}
      details={running}
      work={(node) => verbs.deregister(node.id)}
      workOnAll={(targets) => verbs.onAll("remove", targets)}
    >
      <p>{ACTIONS.remove.consequence}</p>
    </VerbDialog>
  );
}

/** Sets or removes one label on nodes. */
export function LabelDialog({ nodes, onClose }: NodesDialogProps): ReactNode {
  const [mode, setMode] = useState<"set" | "remove">("set");
  const [key, setKey] = useState("");
  const [value, setValue] = useState("");
  const trimmed = key.trim();
  const problem = keyProblem(trimmed) || (mode === "set" ? valueProblem(value) : "");
  const refuse = (node: LiveNode) => {
    if (mode === "set") return node.labels[trimmed] === value && trimmed !== "" ? "already has this label" : "";
    return trimmed === "" || Object.hasOwn(node.labels, trimmed) ? "" : "does not have this label";
  };
  const work = (node: LiveNode): Promise<unknown> =>
    mode === "set" ? verbs.mergeLabels(node.id, { [trimmed]: value }) : verbs.removeLabel(node.id, trimmed);
  return (
    <VerbDialog
      action={mode === "set" ? "Label" : "Remove label from"}
      done={mode === "set" ? "labelled" : "without the label"}
      nodes={nodes}
      onClose={onClose}
      refuse={refuse}
      problem={problem}
      work={work}
      workOnAll={(targets) => verbs.onAll("label", targets, mode === "set" ? { labels: { [trimmed]: value } } : { remove_labels: [trimmed] })}
    >
      <Modes mode={mode} onChange={setMode} />
      <KeyField value={key} onChange={setKey} nodes={nodes} problem={trimmed === "" ? "" : problem} />
      {mode === "set" && <TextField label="Value" value={value} onChange={setValue} />}
      {trimmed !== "" && problem === "" && (
        <p className="muted">
          {mode === "set" ? "Sets" : "Removes"} <bdi className="tag">{written(trimmed, mode === "set" ? value : "")}</bdi>
          {isAutomatic(trimmed) && "; the automatic value returns when the worker registers"}
        </p>
      )}
    </VerbDialog>
  );
}

function Modes({ mode, onChange }: { mode: "set" | "remove"; onChange: (mode: "set" | "remove") => void }): ReactNode {
  const name = useId();
  return (
    <fieldset className="row plain-fieldset">
      <legend className="visually-hidden">Action</legend>
      <label className="row">
        <input type="radio" name={name} checked={mode === "set"} onChange={() => onChange("set")} /> Set a label
      </label>
      <label className="row">
        <input type="radio" name={name} checked={mode === "remove"} onChange={() => onChange("remove")} /> Remove a label
      </label>
    </fieldset>
  );
}

interface FieldProps {
  value: string;
  onChange: (value: string) => void;
  problem: string;
}

function ReasonField({ value, onChange }: Omit<FieldProps, "problem">): ReactNode {
  return <TextField label="Reason" value={value} onChange={onChange} description="Shown in the timeline." problem={tooLong(value)} />;
}

function MinutesField({ value, onChange, problem }: FieldProps): ReactNode {
  const description = "Leave empty for the server default. 0 = immediately.";
  return <TextField label="Deadline in minutes" value={value} onChange={onChange} description={description} problem={problem} numeric />;
}

function KeyField({ nodes, ...field }: FieldProps & { nodes: readonly LiveNode[] }): ReactNode {
  const keys = [...new Set(nodes.flatMap((node) => Object.keys(node.labels)))].sort();
  return <TextField label="Key" suggestions={keys} first {...field} />;
}
