// Adding a machine: a token is created, one line is pasted there, and the progress shows here, live.
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useId, useMemo, useState, type ReactNode, type SubmitEvent } from "react";
import { useAction } from "../../api/action";
import { formatTimeLeft } from "../../lib/format";
import { useChange, useLive, useNow } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { Command } from "../../ui/copy";
import { Problem } from "../../ui/problem";
import { Select } from "../../ui/select";
import { TextInput } from "../../ui/text-field";
import { ApproveDialog, RejectDialog } from "../shared/dialogs";
import { IdentityFacts, Risk } from "../shared/identity";
import { refusal } from "../shared/verbs";
import * as joining from "./joining";
import type { JoinToken, MadeJoinToken } from "./joining";

const TOKENS = ["join-tokens"] as const;

interface AddNodeProps {
  id: string;
  token: MadeJoinToken | null;
  onToken: (token: MadeJoinToken | null) => void;
}

/** The steps of joining; `token` is the one whose machines are shown here. */
export function AddNode({ id, token, onToken }: AddNodeProps): ReactNode {
  return (
    <section id={id} className="add-node stack" aria-labelledby={`${id}-title`}>
      <h2 id={`${id}-title`}>Add a node</h2>
      {token === null ? <TokenForm onMade={onToken} /> : <Joining key={token.id} token={token} onAnother={() => onToken(null)} />}
      <OtherTokens except={token?.id ?? ""} />
      <details>
        <summary>Add a worker on this machine</summary>
        <p>Alongside a cluster started with <code>make run</code>:</p>
        <Command text="make worker NAME=two" />
      </details>
    </section>
  );
}

/** For how long and for how many machines; then the token is made. */
function TokenForm({ onMade }: { onMade: (token: MadeJoinToken) => void }): ReactNode {
  const [lifetime, setLifetime] = useState(3600);
  const [uses, setUses] = useState("1");
  const [note, setNote] = useState("");
  const id = useId();
  const queries = useQueryClient();
  const creation = useAction(
    () => joining.make({ lifetime, uses: Number(uses), note }),
    async (created) => {
      onMade(created);
      announce("The join command is shown.");
      await queries.invalidateQueries({ queryKey: TOKENS });
    },
  );
  const problem = joining.usesProblem(uses);
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (problem === "" && !creation.busy) creation.run();
  };
  return (
    <form className="stack" onSubmit={submit}>
      <p>Run the command on another machine. It installs and starts the worker there; you approve it here.</p>
      <div className="row wrap add-node-wish">
        <Select label="Valid for" value={String(lifetime)} options={joining.LIFETIMES.map(([seconds, words]) => [String(seconds), words])} onChange={(seconds) => setLifetime(Number(seconds))} />
        <label className="field">
          <span>Machines</span>
          <TextInput inputMode="numeric" size={5} value={uses} aria-invalid={problem !== "" || undefined} aria-describedby={problem === "" ? undefined : `${id}-uses`} onChange={setUses} />
        </label>
        <label className="field grow">
          <span>Note (optional)</span>
          <TextInput value={note} maxLength={joining.LONGEST_NOTE} onChange={setNote} />
        </label>
      </div>
      {problem !== "" && (
        <p id={`${id}-uses`} className="field-hint bad" role="alert">
          {problem}
        </p>
      )}
      <Problem error={creation.error} />
      <div>
        <Button type="submit" kind="primary" busy={creation.busy} refusal={problem}>
          Generate join command
        </Button>
      </div>
    </form>
  );
}

/** The line, the token's time, and the machines that come with it. */
function Joining({ token, onAnother }: { token: MadeJoinToken; onAnother: () => void }): ReactNode {
  const nodes = useLive((state) => state.nodes);
  const joined = useMemo(() => joining.joined(nodes.values(), token.id), [nodes, token.id]);
  const [revoked, setRevoked] = useState(false);
  const over = useNow() >= Date.parse(token.expires_at);
  const full = joined.length >= token.max_uses;
  useChange(joined.length, (previous) => {
    if (joined.length > previous) announce(`${joined.at(-1)?.name ?? ""} has joined. Compare its fingerprint and approve it.`);
  });
  const open = !revoked && !over && !full;
  return (
    <>
      {open && (
        <>
          {token.warnings.map((warning) => (
            <p key={warning} className="risk">
              {warning}
            </p>
          ))}
          <p>Run this command on the other machine. It contains the token and is shown only once:</p>
          <Command text={token.command} />
          <Reach token={token} />
        </>
      )}
      <div className="row wrap">
        <Remaining token={token} number={joined.length} revoked={revoked} />
        {open && <Revoke token={token} onRevoked={() => setRevoked(true)} />}
        <Button small onClick={onAnother}>
          Generate another command
        </Button>
      </div>
      {open && (
        <p className="row muted" role="status">
          <span className="spinner" aria-hidden="true" /> Waiting for {joined.length === 0 ? "the machine" : "the next machine"}…
        </p>
      )}
      <ul className="pinned-cards" aria-label="Joined machines">
        {joined.map((node) => (
          <Newcomer key={node.id} node={node} />
        ))}
      </ul>
    </>
  );
}

/** The address in the line, where nobody has set it; what is wrong with it is among the warnings. */
function Reach({ token }: { token: MadeJoinToken }): ReactNode {
  if (token.url_is_set || joining.isLoopback(new URL(token.url).hostname)) return null;
  return (
    <p className="muted">
      The machine must be able to reach <code>{token.url}</code>. Set <code>CLUSTER_PUBLIC_URL</code> to use another address.
    </p>
  );
}

function Remaining({ token, number, revoked }: { token: MadeJoinToken; number: number; revoked: boolean }): ReactNode {
  const seconds = (Date.parse(token.expires_at) - useNow()) / 1000;
  return <span data-testid="token-remaining">The token is {remaining(token.max_uses, number, seconds, revoked)}.</span>;
}

function remaining(most: number, number: number, seconds: number, revoked: boolean): string {
  const used = most === 1 ? (number === 0 ? "not used yet" : "used") : `${number} of ${most} used`;
  if (revoked) return `revoked, ${used}`;
  if (number >= most) return "used up";
  return seconds <= 0 ? `expired, ${used}` : `valid for another ${formatTimeLeft(seconds)}, ${used}`;
}

function Revoke({ token, onRevoked }: { token: JoinToken; onRevoked?: () => void }): ReactNode {
  const queries = useQueryClient();
  const revocation = useAction(
    () => joining.revoke(token.id),
    async () => {
      announce("The token is revoked.");
      onRevoked?.();
      await queries.invalidateQueries({ queryKey: TOKENS });
    },
  );
  return (
    <>
      <Button small kind="danger" busy={revocation.busy} aria-label={`Revoke the token ${token.note || token.id.slice(0, 8)}`} onClick={() => revocation.run()}>
        Revoke
      </Button>
      <Problem error={revocation.error} />
    </>
  );
}

const WORDS = { ok: "done", waiting: "waiting", failed: "failed" } as const;
const TONES = { ok: "good", waiting: "quiet", failed: "bad" } as const;

/** One machine that has come: whom to compare, the decision, and what works so far. */
function Newcomer({ node }: { node: LiveNode }): ReactNode {
  const [openDialog, setDialog] = useState<"" | "approve" | "reject">("");
  const connected = joining.isConnected(node);
  useChange(connected, () => {
    if (connected) announce(`${node.name} is connected.`);
  });
  const dialog = { nodes: [node], onClose: () => setDialog("") };
  const undecided = node.status === "pending" && node.rejected === null;
  return (
    <li className="pinned-card stack" data-testid={`joined-${node.id}`}>
      <h3 className="name">
        <bdi>{node.name}</bdi> {connected && <span className="pill good">connected</span>}
      </h3>
      <IdentityFacts node={node} />
      {undecided && (
        <>
          <Risk node={node} />
          <div className="row wrap">
            <Button kind="primary" refusal={refusal("approve", node)} aria-label={`Approve ${node.name}, which has joined`} onClick={() => setDialog("approve")}>
              Approve…
            </Button>
            <Button aria-label={`Reject ${node.name}, which has joined`} onClick={() => setDialog("reject")}>
              Reject…
            </Button>
          </div>
        </>
      )}
      <ul className="join-checks" aria-label={`Checks of ${node.name}`}>
        {joining.checks(node).map((check) => (
          <li key={check.id}>
            <span className={`pill ${TONES[check.state]}`}>{WORDS[check.state]}</span>
            <span>
              {check.text}
              {check.advice !== "" && <bdi className="muted"> · {check.advice}</bdi>}
            </span>
          </li>
        ))}
      </ul>
      {openDialog === "approve" && <ApproveDialog {...dialog} />}
      {openDialog === "reject" && <RejectDialog {...dialog} />}
    </li>
  );
}

/** Tokens made earlier or elsewhere that still admit machines. */
function OtherTokens({ except }: { except: string }): ReactNode {
  const { data } = useQuery({ queryKey: TOKENS, queryFn: joining.list });
  const now = useNow(5000);
  const usable = (data ?? []).filter((token) => token.state === "usable" && token.id !== except && Date.parse(token.expires_at) > now);
  if (usable.length === 0) return null;
  return (
    <details>
      <summary>Active tokens: {usable.length}</summary>
      <ul className="join-tokens">
        {usable.map((token) => (
          <li key={token.id} className="row wrap">
            <bdi className="name">{token.note || token.id.slice(0, 8)}</bdi>
            <span className="muted">
              by <bdi>{token.created_by}</bdi>, {token.uses} of {token.max_uses} used, valid for another {formatTimeLeft((Date.parse(token.expires_at) - now) / 1000)}
            </span>
            <Revoke token={token} />
          </li>
        ))}
      </ul>
    </details>
  );
}
