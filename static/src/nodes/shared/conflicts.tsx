// Identity conflicts: somebody claims to be a node and is refused until an admin decides. What happened, both sides,
// and what each answer means; see "Conflicts" in the operating guide.
import type { ReactNode } from "react";
import { useAction } from "../../api/action";
import { ACCEPT_CONSEQUENCES, ACTIONS } from "../../api/actions";
import type { components } from "../../api/schema";
import { Button } from "../../ui/button";
import { Confirm } from "../../ui/dialog";
import { Ago } from "../../ui/time";
import { count } from "../../lib/format";
import { Fact, Fingerprint } from "./identity";
import { acceptConflict, refuseConflict } from "./verbs";
import "./shared.css";

export type Conflict = components["schemas"]["Conflict"];
type Kind = Conflict["kind"];

interface Meaning {
  happened: string;
  /** The consequence of accepting; "" if it cannot be accepted. */
  accept: string;
  refuse: string;
  /** Why it cannot be accepted, and what to do instead. */
  instead: string;
}

const STAYS = ACTIONS.refuse.consequence;
const CLOSED = "The node keeps its identity, and the conflict is closed.";

/** The texts of each kind of conflict. */
export const MEANINGS: Readonly<Record<Kind, Meaning>> = {
  secret: {
    happened: "A worker with another secret claims this name. Accept it if you reinstalled this machine; otherwise refuse.",
    accept: ACCEPT_CONSEQUENCES.secret,
    refuse: STAYS,
    instead: "",
  },
  weak: {
    happened: "A worker with its own secret claims this node, which has only the shared token. Accept it if you upgraded the worker.",
    accept: ACCEPT_CONSEQUENCES.weak,
    refuse: STAYS,
    instead: "",
  },
  name: {
    happened: "A worker presented this node's secret under another name. Accept it if you renamed the worker.",
    accept: ACCEPT_CONSEQUENCES.name,
    refuse: STAYS,
    instead: "",
  },
  address: {
    happened:
      "A worker that has only the shared token claims this node from another address. Accept it if the machine's address changed: the worker at the new address receives the node's commands, its requests and the shared token.",
    accept: ACCEPT_CONSEQUENCES.address,
    refuse: STAYS,
    instead: "",
  },
  token: {
    happened: "A worker that has only the shared token claims this node, which has a secret.",
    accept: "",
    refuse: CLOSED,
    instead: "A node with a secret cannot fall back to the shared token. Rename the worker, or remove the node",
  },
  instance: {
    happened: "Two processes use this node's secret, probably because its data folder was copied.",
    accept: "",
    refuse: CLOSED,
    instead: "Stop one of the two processes, or revoke the secret",
  },
};

/** An answer that is to be confirmed. */
export interface ConflictDialog {
  conflict: Conflict;
  answer: "accept" | "refuse";
}

interface CardProps {
  conflict: Conflict;
  /** The node's own. */
  fingerprint: string;
  /** Asks outside of the card: newer claims may push the card out of sight, but not the question. */
  onOpenDialog: (dialog: ConflictDialog) => void;
}

/** One open conflict with its two answers. */
export function ConflictCard({ conflict, fingerprint, onOpenDialog }: CardProps): ReactNode {
  const meaning = MEANINGS[conflict.kind];
  return (
    <div className="stack">
      <p>
        {meaning.happened} {meaning.instead !== "" && <strong>{meaning.instead}.</strong>}
      </p>
      <ConflictFacts conflict={conflict} fingerprint={fingerprint} />
      <div className="row wrap">
        <Button refusal={meaning.instead} aria-label={`Accept the claim to ${conflict.node_name}`} onClick={() => onOpenDialog({ conflict, answer: "accept" })}>
          Accept…
        </Button>
        <Button aria-label={`Refuse the claim to ${conflict.node_name}`} onClick={() => onOpenDialog({ conflict, answer: "refuse" })}>
          Refuse…
        </Button>
      </div>
    </div>
  );
}

function ConflictFacts({ conflict, fingerprint }: { conflict: Conflict; fingerprint: string }): ReactNode {
  const { claimed_name: claimed = "", advertised_address: advertised = "", fingerprint: offered = "" } = conflict;
  return (
    <dl className="facts">
      {claimed !== "" && claimed !== conflict.node_name && (
        <Fact name="New name">
          <bdi>{claimed}</bdi>
        </Fact>
      )}
      {offered !== "" && (
        <>
          <Fact name="Presented">
            <Fingerprint hex={offered} />
          </Fact>
          <Fact name="On record">
            <Fingerprint hex={fingerprint} />
          </Fact>
        </>
      )}
      <Fact name="Source address">
        <span className="mono">{conflict.source_address || "unknown"}</span>
        {advertised !== "" && (
          <>
            {" · Advertises "}
            <bdi className="mono">{advertised}</bdi>
          </>
        )}
      </Fact>
      <Fact name="Node address">
        <span className="mono">{conflict.node_source_address || "unknown"}</span>
      </Fact>
      <Fact name="Attempts">
        {count(conflict.count, "time")}, first <Ago at={conflict.first_at} />, last <Ago at={conflict.last_at} />
      </Fact>
    </dl>
  );
}

/** Asks once more before the answer is given. */
export function Decide({ conflict, answer, onClose }: ConflictDialog & { onClose: () => void }): ReactNode {
  const accept = answer === "accept";
  const decision = useAction(() => (accept ? acceptConflict : refuseConflict)(conflict.node_id, conflict.id), `Claim to ${conflict.node_name} ${accept ? "accepted" : "refused"}`);
  return (
    <Confirm
      open
      onClose={onClose}
      danger
      title={
        <>
          {accept ? "Accept" : "Refuse"} the claim to <bdi>{conflict.node_name}</bdi>
        </>
      }
      action={accept ? "Accept" : "Refuse"}
      busy={decision.busy}
      error={decision.error}
      onConfirm={() => decision.run(undefined, onClose)}
    >
      <p>{accept ? MEANINGS[conflict.kind].accept : MEANINGS[conflict.kind].refuse}</p>
    </Confirm>
  );
}
