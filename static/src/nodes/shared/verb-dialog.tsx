// The frame of every dialog that does something to one or many nodes: names them, names those left out and why,
// then shows what became of each. What it names is what was there when it was opened: a node that changes under
// the reader is refused by the server, not silently swapped. Mount it when it is asked for.
import { memo, useContext, useEffect, useRef, useState, type ReactNode, type RefObject, type SubmitEvent } from "react";
import { ApiError } from "../../api/client";
import { count } from "../../lib/format";
import { LiveContext } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { CopyButton } from "../../ui/copy";
import { Dialog } from "../../ui/dialog";
import { Problem } from "../../ui/problem";
import { tally, useBulk, type Bulk, type Outcome, type Outcomes, type Work, type WorkOnAll } from "./bulk";
import { Names } from "./names";
import "./shared.css";

/** The properties of every verb's dialog. */
export interface NodesDialogProps {
  nodes: readonly LiveNode[];
  onClose: () => void;
}

interface VerbDialogProps extends NodesDialogProps {
  /** As on the button: "Drain". */
  action: string;
  /** The object on the node, such as a backend; the node itself by default. */
  subject?: string;
  /** As in the sentence afterwards: "drained". */
  done: string;
  /** Something stops or is lost. */
  danger?: boolean;
  /** Why the verb makes no sense for a node; "" if it does. */
  refuse: (node: LiveNode) => string;
  /** Why the form cannot be sent yet; "" if it can. */
  problem?: string;
  /** Text beside a node's name before the request. */
  details?: (node: LiveNode) => ReactNode;
  /** The consequence and the fields, once, under the list. A function gets the nodes as named. */
  children: ReactNode | ((nodes: readonly LiveNode[]) => ReactNode);
  /** Asks the server about one node; a text as the answer is shown, this once. */
  work: Work<LiveNode>;
  /** Asks the server about several nodes at once. */
  workOnAll: WorkOnAll<LiveNode>;
}


export function VerbDialog(props: VerbDialogProps): ReactNode {
  const { action, done, onClose } = props;
  /** Reasons of the server, by node. */
  const [refused, setRefused] = useState<ReadonlyMap<string, string>>(new Map());
  const refuse = (node: LiveNode) => refused.get(node.id) ?? props.refuse(node);
  const cancel = useRef<HTMLButtonElement>(null);
  const store = useContext(LiveContext);
  const [nodes, setNodes] = useState(props.nodes);
  const [requestedNodes, setRequestedNodes] = useState<readonly LiveNode[]>([]);
  const bulk = useBulk<LiveNode>();
  const fit = nodes.filter((node) => refuse(node) === "");
  const shown = useShown();
  const run = async (chosen: readonly LiveNode[]) => {
    const targets = requestedNodes.length === 0 ? chosen : requestedNodes;
    setRequestedNodes(targets);
    let outcomes: Outcomes;
    try {
      outcomes = await bulk.start(chosen, props.work, props.workOnAll);
    } catch (error) {
      // Nothing has started: the question is asked again for the others. After a retry some nodes are done.
      if (!(error instanceof ApiError)) throw error;
      setNodes(chosen);
      setRefused(new Map([...refused, ...error.refusals.map(({ id, reason }) => [id, reason] as const)]));
      setRequestedNodes([]);
      announce(refusedText(error.refusals.length));
      return;
    }
    // The end of an operation is announced by whoever watches operations.
    if (chosen.length === 1) announce(summary(outcomes, done));
    if (shown.current && targets.length === 1 && [...outcomes.values()].every(isSilentSuccess)) onClose();
  };
  const refreshNodes = () => {
    const current = store.read().nodes;
    setNodes(nodes.flatMap((node) => current.get(node.id) ?? []));
    setRefused(new Map());
    setRequestedNodes([]);
  };
  const title = (
    <>
      {action} {props.subject !== undefined && <><bdi>{props.subject}</bdi> on </>}{nodes.length === 1 ? <bdi>{nodes[0]?.name}</bdi> : count(fit.length, "node")}
    </>
  );
  return (
    <Dialog open onClose={bulk.running && !bulk.stopping && bulk.jobID === "" ? bulk.stop : onClose} title={title} first={cancel}>
      {requestedNodes.length === 0 ? (
        <Question {...props} refuse={refuse} nodes={nodes} fit={fit} refusedCount={refused.size} cancel={cancel} onRun={() => void run(fit)} />
      ) : (
        <Results requestedNodes={requestedNodes} bulk={bulk} done={done} onClose={onClose} onRun={(retried) => void run(retried)} onRefresh={refreshNodes} />
      )}
    </Dialog>
  );
}

function refusedText(nodes: number): string {
  return `Nothing has started: the action is not possible for ${count(nodes, "node")}.`;
}

/** True if the dialog is still there: an answer that comes later must not close the next one. */
function useShown(): RefObject<boolean> {
  const shown = useRef(false);
  useEffect(() => {
    shown.current = true;
    return () => {
      shown.current = false;
    };
  }, []);
  return shown;
}

function isSilentSuccess(outcome: Outcome): boolean {
  return outcome.state === "done" && outcome.note === undefined;
}

/** "3 nodes drained, 1 failed" */
function summary(outcomes: Outcomes, done: string): string {
  const failed = tally(outcomes, "failed");
  const stopped = tally(outcomes, "stopped");
  const parts = [`${count(tally(outcomes, "done"), "node")} ${done}`];
  if (failed > 0) parts.push(`${failed} failed`);
  if (stopped > 0) parts.push(`${stopped} cancelled`);
  return parts.join(", ");
}

interface QuestionProps extends VerbDialogProps {
  fit: readonly LiveNode[];
  /** The number of nodes that the server has refused. */
  refusedCount: number;
  cancel: RefObject<HTMLButtonElement | null>;
  onRun: () => void;
}

function Question(props: QuestionProps): ReactNode {
  const { action, nodes, fit, refusedCount, cancel, danger = false, refuse, details, problem = "", onClose, onRun } = props;
  const skipped = nodes.filter((node) => refuse(node) !== "");
  const why = fit.length === 0 ? "Not possible for any selected node" : problem;
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (why === "") onRun();
  };
  return (
    <form className="stack" onSubmit={submit}>
      {refusedCount > 0 && <p className="problem" role="alert">{refusedText(refusedCount)} Continue with the others?</p>}
      {(nodes.length > 1 || details !== undefined) && <Names nodes={fit.map((node) => [node, details?.(node)])} />}
      {skipped.length > 0 && (
        <section className="stack" aria-label="Skipped">
          <h3>Skipped: {count(skipped.length, "node")}</h3>
          <Names nodes={skipped.map((node) => [node, <span key={node.id} className="muted">{refuse(node)}</span>])} />
        </section>
      )}
      {typeof props.children === "function" ? props.children(nodes) : props.children}
      <div className="row wrap">
        <Button type="submit" kind={danger ? "danger" : "primary"} refusal={why}>
          {action} {nodes.length > 1 && count(fit.length, "node")}
        </Button>
        <Button ref={cancel} onClick={onClose}>
          Cancel
        </Button>
      </div>
    </form>
  );
}

interface ResultsProps {
  requestedNodes: readonly LiveNode[];
  bulk: Bulk<LiveNode>;
  done: string;
  onClose: () => void;
  onRun: (nodes: readonly LiveNode[]) => void;
  onRefresh: () => void;
}

function Results({ requestedNodes, bulk, done, onClose, onRun, onRefresh }: ResultsProps): ReactNode {
  const { outcomes, running, stopping, stop, jobID } = bulk;
  const failed = requestedNodes.filter((node) => outcomes.get(node.id)?.state === "failed");
  const changed = failed.some((node) => isConflict(outcomes.get(node.id)));
  // The failed ones first: no one should have to look for them among five hundred.
  const rank = (node: LiveNode) => (outcomes.get(node.id)?.state === "failed" ? 0 : 1);
  const ordered = running ? requestedNodes : requestedNodes.toSorted((skipped, right) => rank(skipped) - rank(right));
  return (
    <div className="stack">
      <p>{running ? `${requestedNodes.length - pending(outcomes)} of ${requestedNodes.length} done` : summary(outcomes, done)}</p>
      <ul className="verb-nodes" tabIndex={0} aria-label="Results">
        {ordered.map((node) => (
          <Result key={node.id} node={node} outcome={outcomes.get(node.id)} done={done} />
        ))}
      </ul>
      <div className="row wrap">
        {running && !stopping && <Button onClick={stop}>Stop</Button>}
        {!running && failed.length > 0 && (
          <Button kind="primary" onClick={() => onRun(failed)}>
            Retry {requestedNodes.length > 1 ? `failed (${failed.length})` : ""}
          </Button>
        )}
        {!running && changed && <Button onClick={onRefresh}>Review again</Button>}
        {running && !stopping && jobID !== "" && (
          <Button autoFocus onClick={onClose}>
            Continue in background
          </Button>
        )}
        {(!running || stopping) && (
          <Button autoFocus onClick={onClose}>
            Close
          </Button>
        )}
      </div>
    </div>
  );
}

function pending(outcomes: Outcomes): number {
  return tally(outcomes, "waiting") + tally(outcomes, "running");
}

function isConflict(outcome: Outcome | undefined): boolean {
  return outcome?.error instanceof ApiError && outcome.error.status === 409;
}

const OUTCOME_TEXTS: Readonly<Record<Exclude<Outcome["state"], "done" | "failed">, string>> = {
  waiting: "waiting",
  running: "sending…",
  stopped: "cancelled",
};

interface ResultProps {
  node: LiveNode;
  outcome: Outcome | undefined;
  done: string;
}

/** Drawn again only when its own outcome changes. */
const Result = memo(function Result({ node, outcome, done }: ResultProps): ReactNode {
  const state = outcome?.state ?? "waiting";
  return (
    <li className="verb-node" data-state={state}>
      <bdi className="name" title={node.name}>
        {node.name}
      </bdi>
      {state === "done" && <span className="pill good verb-said">{done}</span>}
      {state === "failed" && <span className="pill bad verb-said">failed</span>}
      {state !== "done" && state !== "failed" && <span className="muted verb-said">{OUTCOME_TEXTS[state]}</span>}
      <Problem quiet error={outcome?.error ?? null} />
      {outcome?.note !== undefined && <Once text={outcome.note} />}
    </li>
  );
});

/** An agent's token exists nowhere else. */
function Once({ text }: { text: string }): ReactNode {
  return (
    <div className="stack once">
      <span>The agent's API token. It is shown only once, so copy it now.</span>
      <span className="fingerprint">
        <code>{text}</code>
        <CopyButton small text={text} label="Copy token" />
      </span>
    </div>
  );
}
