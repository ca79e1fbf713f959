// The dialogs of the verbs, for one node or many. Each is mounted when it is asked for and sends what the reader
// saw; see `verb-dialog.tsx` for what they share.
import { useId, useState, type ReactNode } from "react";
import { count, grouped } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
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
    >
      {(seen) => (alone ? seen.map((node) => <Alone key={node.id} node={node} />) : <Risks nodes={seen} />)}
    </VerbDialog>
  );
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
      {nodes.some((node) => node.weak_identity) && <p className="risk">Marked “shared token only”: {WEAK_RISK}</p>}
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
      problem={reason.trim() === "" ? "Give a reason: somebody will ask" : tooLong(reason)}
      work={(node) => verbs.reject(node.id, reason)}
    >
      <p>It stays pending and gets no work. Registering again does not change that; approving it takes this back.</p>
      <ReasonField value={reason} onChange={setReason} />
    </VerbDialog>
  );
}

/** Sends nothing new to nodes; asks why, and how long running requests may take. */
export function DrainDialog({ nodes, onClose }: NodesDialogProps): ReactNode {
  const [reason, setReason] = useState("");
  const [minutes, setMinutes] = useState("");
  const deadline = minutes.trim() === "" ? null : Number(minutes);
  const wrong = deadlineProblem(deadline);
  return (
    <VerbDialog
      action="Drain"
      done="set to draining"
      danger
      nodes={nodes}
      onClose={onClose}
      refuse={(node) => verbs.refusal("drain", node)}
      problem={wrong || tooLong(reason)}
      details={running}
      work={(node) => verbs.drain(node.id, reason, deadline)}
    >
      <p>
        Nothing new is sent there. What runs may end until the deadline; then its replicas go in any case. Only Resume
        ends it, not a restart.
      </p>
      <ReasonField value={reason} onChange={setReason} />
      <MinutesField value={minutes} onChange={setMinutes} problem={wrong} />
    </VerbDialog>
  );
}

function running(node: LiveNode): ReactNode {
  if (node.model_count === 0) return <span className="muted">nothing loaded</span>;
  return (
    <span className="muted">
      {count(node.model_count, "replica")}, {count(node.in_flight_count, "request")} in flight
    </span>
  );
}

/** What is wrong with a deadline in minutes; "" if nothing is. */
export function deadlineProblem(minutes: number | null): string {
  if (minutes === null) return "";
  const fits = minutes >= 0 && minutes <= verbs.LONGEST_DEADLINE_MINUTES;
  return fits ? "" : `Give 0 to ${verbs.LONGEST_DEADLINE_MINUTES} minutes.`;
}

function tooLong(reason: string): string {
  return reason.length > verbs.LONGEST_REASON ? `A reason has at most ${verbs.LONGEST_REASON} characters` : "";
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
    >
      <p>It gets work again; one that is offline waits for its next heartbeat.</p>
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
    >
      <p>
        The record is deregistered with its labels and what waits for it; its timeline stays. A worker that still runs
        comes back as a new, pending node: stop it first.
      </p>
    </VerbDialog>
  );
}

/** Sets or removes one label on nodes. */
export function LabelDialog({ nodes, onClose }: NodesDialogProps): ReactNode {
  const [mode, setMode] = useState<"set" | "remove">("set");
  const [key, setKey] = useState("");
  const [value, setValue] = useState("");
  const trimmed = key.trim();
  const wrong = keyProblem(trimmed) || (mode === "set" ? valueProblem(value) : "");
  const refuse = (node: LiveNode) => {
    if (mode === "set") return node.labels[trimmed] === value && trimmed !== "" ? "it has this label" : "";
    return trimmed === "" || Object.hasOwn(node.labels, trimmed) ? "" : "it has no such label";
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
      problem={wrong}
      work={work}
    >
      <Modes mode={mode} onChange={setMode} />
      <KeyField value={key} onChange={setKey} nodes={nodes} problem={trimmed === "" ? "" : wrong} />
      {mode === "set" && <TextField label="Value" value={value} onChange={setValue} />}
      {trimmed !== "" && wrong === "" && (
        <p className="muted">
          {mode === "set" ? "Sets" : "Removes"} <bdi className="tag">{written(trimmed, mode === "set" ? value : "")}</bdi>
          {isAutomatic(trimmed) && "; the registry writes its own value again when the worker registers"}
        </p>
      )}
    </VerbDialog>
  );
}

function Modes({ mode, onChange }: { mode: "set" | "remove"; onChange: (mode: "set" | "remove") => void }): ReactNode {
  const name = useId();
  return (
    <fieldset className="row plain-fieldset">
      <legend className="visually-hidden">What to do</legend>
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
  label: string;
  value: string;
  onChange: (value: string) => void;
  hint?: string;
  problem?: string;
  list?: string;
  numeric?: boolean;
  /** The focus starts here and not on the safe answer. */
  autoFocus?: boolean;
}

function TextField({ label, value, onChange, hint = "", problem = "", list, numeric = false, autoFocus = false }: FieldProps): ReactNode {
  const id = useId();
  const said = problem || hint;
  return (
    <label className="field" htmlFor={id}>
      <span>{label}</span>
      <input
        id={id}
        className="input"
        value={value}
        autoComplete="off"
        autoFocus={autoFocus}
        inputMode={numeric ? "numeric" : "text"}
        aria-invalid={problem !== "" || undefined}
        aria-describedby={said === "" ? undefined : `${id}-hint`}
        {...(list === undefined ? {} : { list })}
        onChange={(event) => onChange(event.target.value)}
      />
      {said !== "" && (
        <span id={`${id}-hint`} className={`field-hint ${problem === "" ? "" : "bad"}`}>
          {said}
        </span>
      )}
    </label>
  );
}

function ReasonField({ value, onChange }: Pick<FieldProps, "value" | "onChange">): ReactNode {
  return <TextField label="Reason" value={value} onChange={onChange} hint="It goes into the timeline." problem={tooLong(value)} />;
}

function MinutesField({ value, onChange, problem }: Pick<FieldProps, "value" | "onChange"> & { problem: string }): ReactNode {
  const hint = "Empty: as the server is set, one hour unless somebody changed it. 0: at once.";
  return <TextField label="Deadline in minutes" value={value} onChange={onChange} hint={hint} problem={problem} numeric />;
}

function KeyField({ nodes, ...rest }: Omit<FieldProps, "label"> & { nodes: readonly LiveNode[] }): ReactNode {
  const list = useId();
  const keys = [...new Set(nodes.flatMap((node) => Object.keys(node.labels)))].sort();
  return (
    <>
      <TextField label="Key" {...rest} list={list} autoFocus />
      <datalist id={list}>
        {keys.map((key) => (
          <option key={key} value={key} />
        ))}
      </datalist>
    </>
  );
}
