// Asks before backends are upgraded, installed again or deleted: names the nodes and, on each, the replicas that stop.
// An upgrade of several nodes goes in waves unless said otherwise; nodes that the server refuses are named, and the others can go on; a model's last replica is confirmed by name.
import { useRef, useState, type ReactNode, type SubmitEvent } from "react";
import { useAction, type Action } from "../api/action";
import { compareNames, count } from "../lib/format";
import type { LiveNode } from "../live/messages";
import { usersOf } from "../nodes/detail/words";
import { Names } from "../nodes/shared/names";
import { refusal } from "../nodes/shared/verbs";
import { Confirmations } from "../operations/last-replicas";
import { useWork } from "../operations/watch";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Dialog } from "../ui/dialog";
import { Problem } from "../ui/problem";
import { pendingOf } from "./installed-model";
import { changeAll, type BackendRequest, type Outcome, type Verb } from "./installed-calls";
import { ONE_BY_ONE, WaveFields, waveProblem, wavesOf, type WaveChoice } from "./wave-fields";
import "../nodes/shared/shared.css";

/** The change: backends, and the nodes of each. */
export interface Change {
  verb: Verb;
  backends: readonly { name: string; nodes: readonly LiveNode[] }[];
}

const LABEL: Readonly<Record<Verb, string>> = { upgrade: "Upgrade", reinstall: "Reinstall", delete: "Delete" };
const EFFECT: Readonly<Record<Verb, string>> = {
  upgrade: "The backend is installed again, in the version that the gallery has now.",
  reinstall: "The gallery's version replaces the installed version.",
  delete: "The backend's files are removed from these nodes. The next load that needs the backend on a node installs it again.",
};

const KIND = { upgrade: "primary", reinstall: "primary", delete: "danger" } as const;

const NOTHING: Outcome = { started: [], lastReplicas: new Map(), refused: new Map(), failed: new Map() };

interface DialogProps {
  change: Change;
  onClose: () => void;
}

interface Submission {
  /** Without the nodes that the server has refused. */
  backends: Change["backends"];
  /** The nodes that can take it, and those that cannot, with the names of their backends. */
  fit: ReturnType<typeof byNode>;
  skipped: ReturnType<typeof byNode>;
  /** Models whose last replica would stop. */
  toConfirm: readonly string[];
  /** Why it cannot be sent yet; "" if it can. */
  why: string;
  outcome: Outcome;
  request: Action;
}

/** What is sent next, and what has become of what was sent. */
function useSubmission({ change: { verb, backends: requested }, onClose }: DialogProps, waveChoice: WaveChoice, confirmed: ReadonlySet<string>): Submission {
  const [outcome, setOutcome] = useState(NOTHING);
  const backends = withoutRefused(requested, outcome.refused);
  const namesByNode = byNode(backends);
  const fit = namesByNode.filter(([node]) => refusal("install", node) === "");
  const skipped = namesByNode.filter(([node]) => refusal("install", node) !== "");
  const several = fit.length > 1;
  const waves = verb === "upgrade" && several ? wavesOf(waveChoice) : null;
  const requests = nextRequests(backendRequests(backends, (backend) => (outcome.lastReplicas.get(backend) ?? []).filter((model) => confirmed.has(model))), outcome);
  const toConfirm = waves !== null ? [...new Set([...outcome.lastReplicas.values()].flat())].sort() : [];
  const why = problemOf(fit, toConfirm, confirmed) || (several && verb === "upgrade" ? waveProblem(waveChoice) : "");
  const request = useAction(
    () => changeAll(verb, requests, waves),
    (now) => {
      const after = merged(outcome, now);
      setOutcome(after);
      if (now.started.length < requests.length || after.failed.size > 0) return;
      announce(`${LABEL[verb]} requested`);
      onClose();
    },
  );
  return { backends, fit, skipped, toConfirm, why, outcome, request };
}

export function ChangeDialog(props: DialogProps): ReactNode {
  const { change: { verb, backends: requested }, onClose } = props;
  const cancel = useRef<HTMLButtonElement>(null);
  const [waveChoice, setWaveChoice] = useState(ONE_BY_ONE);
  const [confirmed, setConfirmed] = useState<ReadonlySet<string>>(new Set());
  const { backends, fit, skipped, toConfirm, why, outcome, request } = useSubmission(props, waveChoice, confirmed);
  const nodes = [...fit, ...skipped];
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (why === "" && !request.busy) request.run();
  };
  const subject = backends.length === 1 ? (backends[0]?.name ?? "") : count(backends.length, "backend");
  const title = (
    <>
      {LABEL[verb]} <bdi>{subject}</bdi> on {nodes.length === 1 ? <bdi>{nodes[0]?.[0].name}</bdi> : count(fit.length, "node")}
    </>
  );
  return (
    <Dialog open onClose={onClose} title={title} first={cancel}>
      <form className="stack" onSubmit={submit}>
        <Names nodes={fit.map(([node, names]) => [node, <Stops key={node.id} node={node} backends={names} named={backends.length > 1} />])} />
        <Skipped nodes={skipped.map(([node]) => node)} />
        <Refused refused={outcome.refused} named={requested.length > 1} hasStarted={outcome.started.length > 0} />
        <Waits backends={backends} />
        <p>{EFFECT[verb]} Replicas that use the backend under another name, such as an alias, stop too. The next request for one of their models loads the model again.</p>
        {verb === "upgrade" && fit.length > 1 && (
          <WaveFields choice={waveChoice} onChange={setWaveChoice} inWaves="In waves: each node is upgraded after its requests end. If nodes fail, the upgrade waits for your decision." atOnce="All at once: requests in flight end with an error." />
        )}
        <Confirmations models={toConfirm} confirmed={confirmed} onChange={setConfirmed} />
        <ResultMessage outcome={outcome} error={request.error} named={backends.length > 1} />
        <div className="row wrap">
          <Button type="submit" kind={KIND[verb]} refusal={why} busy={request.busy}>
            {LABEL[verb]} {nodes.length > 1 && count(fit.length, "node")}
          </Button>
          <Button ref={cancel} onClick={onClose}>
            Cancel
          </Button>
        </div>
      </form>
    </Dialog>
  );
}

function Skipped({ nodes }: { nodes: readonly LiveNode[] }): ReactNode {
  if (nodes.length === 0) return null;
  return (
    <section className="stack" aria-label="Skipped">
      <h3>Skipped: {count(nodes.length, "node")}</h3>
      <Names nodes={nodes.map((node) => [node, <span key={node.id} className="muted">{refusal("install", node)}</span>])} />
    </section>
  );
}

/** The outcome after one more answer, which names only what is new: confirmed models stay confirmed. */
function merged(before: Outcome, now: Outcome): Outcome {
  const failed = [...before.failed, ...now.failed].filter(([backend]) => !now.started.includes(backend));
  return { started: [...before.started, ...now.started], lastReplicas: appended(before.lastReplicas, now.lastReplicas), refused: appended(before.refused, now.refused), failed: new Map(failed) };
}

function appended<Item>(before: ReadonlyMap<string, readonly Item[]>, now: ReadonlyMap<string, readonly Item[]>): Map<string, readonly Item[]> {
  return new Map([...before, ...[...now].map(([backend, items]) => [backend, [...(before.get(backend) ?? []), ...items]] as const)]);
}

/** What has not started; without what failed as long as there are others, which it would hold back. */
function nextRequests(requests: readonly BackendRequest[], { started, failed }: Outcome): readonly BackendRequest[] {
  const open = requests.filter(({ backend }) => !started.includes(backend));
  const others = open.filter(({ backend }) => !failed.has(backend));
  return others.length > 0 ? others : open;
}

/** The backends with the nodes that the server has not refused. */
function withoutRefused(backends: Change["backends"], refused: Outcome["refused"]): Change["backends"] {
  return backends.map(({ name, nodes }) => {
    const ids = new Set((refused.get(name) ?? []).map((node) => node.id));
    return { name, nodes: nodes.filter((node) => !ids.has(node.id)) };
  });
}

/** The nodes that the server has refused; the button goes on with the others. */
function Refused({ refused, named, hasStarted }: { refused: Outcome["refused"]; named: boolean; hasStarted: boolean }): ReactNode {
  if (refused.size === 0) return null;
  return (
    <section className="problem" role="alert" aria-label="Refused">
      <div className="stack grow">
        <strong>{hasStarted ? "Some" : "Nothing has started, because some"} nodes cannot run this action. Continue with the others?</strong>
        <ul>
          {[...refused].flatMap(([backend, nodes]) =>
            nodes.map((node) => (
              <li key={`${backend} ${node.id}`}>
                {named && <>{backend}: </>}
                <bdi className="name">{node.name}</bdi>: <bdi>{node.reason}</bdi>
              </li>
            )),
          )}
        </ul>
      </div>
    </section>
  );
}

/** Earlier requests, which come first on the same node. */
function Waits({ backends }: { backends: Change["backends"] }): ReactNode {
  const { operations } = useWork();
  const pending = backends.reduce((sum, { name }) => sum + pendingOf([...operations.values()], name).operations, 0);
  return pending === 0 ? null : <p role="status">{count(pending, "operation")} pending on {backends.length === 1 ? "it" : "them"}. This operation runs after those on the same node.</p>;
}

/** Why it cannot be sent yet; "" if it can. */
function problemOf(fit: readonly unknown[], models: readonly string[], confirmed: ReadonlySet<string>): string {
  if (fit.length === 0) return "Not possible for any selected node";
  return models.some((model) => !confirmed.has(model)) ? "Confirm each model first" : "";
}

/** The outcome of each requested backend. */
function ResultMessage({ outcome, error, named }: { outcome: Outcome; error: Error | null; named: boolean }): ReactNode {
  return (
    <>
      <Problem error={error} />
      {[...outcome.failed].map(([backend, why]) => (
        <div key={backend}>
          {named && <bdi className="name">{backend}</bdi>}
          <Problem error={why} />
        </div>
      ))}
      {outcome.started.length > 0 && <p role="status">Requested: {outcome.started.join(", ")}</p>}
    </>
  );
}

type Named = readonly [node: LiveNode, backends: readonly string[]];

/** Each node once, with the backends that are changed there. */
function byNode(backends: Change["backends"]): Named[] {
  const replicasByNode = new Map<string, [LiveNode, string[]]>();
  for (const { name, nodes } of backends) {
    for (const node of nodes) {
      const nodeReplicas = replicasByNode.get(node.id);
      if (nodeReplicas === undefined) replicasByNode.set(node.id, [node, [name]]);
      else nodeReplicas[1].push(name);
    }
  }
  return [...replicasByNode.values()].sort(([skipped], [right]) => compareNames(skipped.name, right.name));
}

/** One for each backend that has a node left: without nodes, the server would take all. */
function backendRequests(backends: Change["backends"], confirmedFor: (backend: string) => string[]): BackendRequest[] {
  return backends
    .map(({ name, nodes }) => ({ backend: name, nodes: nodes.filter((node) => refusal("install", node) === "").map((node) => node.id), lastReplicas: confirmedFor(name) }))
    .filter(({ nodes }) => nodes.length > 0);
}

/** The replicas that stop on a node, by name, and the requests that are cut off. */
function Stops({ node, backends, named }: { node: LiveNode; backends: readonly string[]; named: boolean }): ReactNode {
  const models = backends.flatMap((backend) => usersOf(node, backend));
  const requests = models.reduce((sum, model) => sum + model.in_flight, 0);
  return (
    <span className={models.length === 0 ? "muted" : ""}>
      {named && <>{backends.join(", ")}: </>}
      {models.length === 0 ? "no replica stops" : `${count(models.length, "replica")} with ${count(requests, "request")} in flight ${models.length === 1 ? "stops" : "stop"}: `}
      {models.map((model, index) => (
        <span key={model.id}>
          {index > 0 && ", "}
          <bdi>{model.model_name}</bdi> #{model.replica_index}
        </span>
      ))}
      {node.status === "offline" && "; waits until the node is online"}
    </span>
  );
}
