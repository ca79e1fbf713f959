// The top of the page: which node, how it is and why, and what can be done with it now.
import { useEffect, useState, type ReactNode } from "react";
import { Link, useLocation, useNavigate } from "react-router";
import { left } from "../../lib/format";
import { useChange, useNow } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { Menu } from "../../ui/menu";
import { Ago } from "../../ui/time";
import { ApproveDialog, DrainDialog, RejectDialog, ResumeDialog } from "../shared/dialogs";
import { NodeStatus } from "../shared/node-status";
import { refusal } from "../shared/verbs";
import { keptFilter } from "./back";
import { DANGERS, type Danger } from "./danger";
import { InstallDialog } from "./install";
import { drainLeft } from "./words";

const LIST = "/app/nodes";

/** Back to the list as it was left. */
export function BackLink(): ReactNode {
  const [filter] = useState(() => keptFilter(LIST));
  return (
    <nav aria-label="Back">
      <Link to={{ pathname: LIST, search: filter }}>← All nodes</Link>
    </nav>
  );
}

type Asked = "" | "approve" | "reject" | "drain" | "resume" | "install";

const ASKED: readonly Asked[] = ["approve", "reject", "drain", "resume", "install"];

/** Which dialog is open. An address with `do=drain` opens it once, and is the node's own again. */
function useAsked(): [Asked, (asked: Asked) => void] {
  const { search, key } = useLocation();
  const navigate = useNavigate();
  const named = new URLSearchParams(search).get("do");
  const wanted = ASKED.find((verb) => verb === named) ?? "";
  const [asked, setAsked] = useState<Asked>("");
  const [adopted, setAdopted] = useState("");
  if (wanted !== "" && adopted !== key) {
    setAdopted(key);
    setAsked(wanted);
  }
  useEffect(() => {
    if (wanted !== "") void navigate({ search: "" }, { replace: true, preventScrollReset: true });
  }, [wanted, navigate]);
  return [asked, setAsked];
}

interface HeadProps {
  node: LiveNode;
  operations: number;
  /** Asks what cannot be taken back. */
  onDanger: (verb: Danger) => void;
}

export function Head({ node, operations, onDanger }: HeadProps): ReactNode {
  const [asked, setAsked] = useAsked();
  const close = () => setAsked("");
  const dialog = { nodes: [node], onClose: close };
  return (
    <header className="nd-head">
      <BackLink />
      <div className="row wrap spread">
        <div className="row wrap grow">
          <NodeStatus node={node} />
          <h1 tabIndex={-1}>
            <bdi>{node.name}</bdi>
          </h1>
        </div>
        <div className="row wrap">
          <Actions node={node} onAsk={setAsked} />
          <Menu name={`More actions for ${node.name}`} items={DANGERS.map(([verb, label]) => ({ label: `${label}…`, danger: true, refusal: refusal(verb, node), onSelect: () => onDanger(verb) }))} />
        </div>
      </div>
      <Reason node={node} />
      <DrainProgress node={node} operations={operations} />
      {asked === "approve" && <ApproveDialog {...dialog} />}
      {asked === "reject" && <RejectDialog {...dialog} />}
      {asked === "drain" && <DrainDialog {...dialog} />}
      {asked === "resume" && <ResumeDialog {...dialog} />}
      {asked === "install" && <InstallDialog id={node.id} onClose={close} />}
    </header>
  );
}

/** The buttons that make sense in this state; an approval that is refused for now says why. */
function Actions({ node, onAsk }: { node: LiveNode; onAsk: (verb: Asked) => void }): ReactNode {
  if (node.status === "pending") {
    return (
      <div className="row wrap">
        <Button kind="primary" refusal={refusal("approve", node)} onClick={() => onAsk("approve")}>
          Approve…
        </Button>
        <Button refusal={refusal("reject", node)} onClick={() => onAsk("reject")}>
          Reject…
        </Button>
      </div>
    );
  }
  return (
    <div className="row wrap">
      {refusal("resume", node) === "" && <Button onClick={() => onAsk("resume")}>Resume…</Button>}
      {refusal("drain", node) === "" && <Button onClick={() => onAsk("drain")}>Drain…</Button>}
      {refusal("install", node) === "" && <Button onClick={() => onAsk("install")}>Install backend…</Button>}
    </div>
  );
}

function Reason({ node }: { node: LiveNode }): ReactNode {
  return (
    <p className="row wrap nd-reason">
      <span>
        {node.reason !== "" && <bdi>{node.reason}</bdi>}
        {node.since !== null && (
          <span className="muted">
            {node.reason === "" ? "" : ", "}
            <Ago at={node.since} />
          </span>
        )}
      </span>
      {node.address !== "" && <bdi className="mono">{node.address}</bdi>}
      {node.node_type === "agent" && <span className="tag">agent</span>}
    </p>
  );
}

function DrainProgress({ node, operations }: { node: LiveNode; operations: number }): ReactNode {
  const found = drainLeft(node, operations);
  useChange(found?.safe === true, (before) => {
    if (!before && found?.safe === true) announce(`${node.name} can be powered off safely.`);
  });
  if (found === null) return null;
  return (
    <p className={`nd-drain ${found.safe ? "good" : ""}`}>
      <strong>{found.text}</strong>
      {!found.safe && node.drain?.deadline != null && <TimeLeft until={node.drain.deadline} />}
    </p>
  );
}

function TimeLeft({ until }: { until: string }): ReactNode {
  const now = useNow(1000);
  const seconds = (Date.parse(until) - now) / 1000;
  if (seconds <= 0) return <span> · deadline passed, stopping replicas</span>;
  return <span> · {left(seconds)} until replicas are stopped</span>;
}
