// The top of the page: which node, how it is and why, and what can be done with it now.
import { useEffect, useState, type ReactNode } from "react";
import { Link, useLocation, useNavigate } from "react-router";
import { formatTimeLeft } from "../../lib/format";
import { useChange, useNow } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { Menu } from "../../ui/menu";
import { Ago } from "../../ui/time";
import { ApproveDialog, DrainDialog, RejectDialog, ResumeDialog } from "../shared/dialogs";
import { InstallDialog } from "../shared/install-dialog";
import { NodeStatus } from "../shared/node-status";
import { refusal } from "../shared/verbs";
import { keptFilter } from "./back-link";
import { DANGERS, type Danger } from "./danger";
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

type HeadDialog = "" | "approve" | "reject" | "drain" | "resume" | "install";

const HEAD_DIALOGS: readonly HeadDialog[] = ["approve", "reject", "drain", "resume", "install"];

/** The open dialog. An address with `do=drain` opens it once, and is the node's own again. */
function useHeadDialog(): [HeadDialog, (dialog: HeadDialog) => void] {
  const { search, key } = useLocation();
  const navigate = useNavigate();
  const named = new URLSearchParams(search).get("do");
  const requested = HEAD_DIALOGS.find((verb) => verb === named) ?? "";
  const [dialog, setDialog] = useState<HeadDialog>("");
  const [adopted, setAdopted] = useState("");
  if (requested !== "" && adopted !== key) {
    setAdopted(key);
    setDialog(requested);
  }
  useEffect(() => {
    if (requested !== "") void navigate({ search: "" }, { replace: true, preventScrollReset: true });
  }, [requested, navigate]);
  return [dialog, setDialog];
}

interface HeadProps {
  node: LiveNode;
  operations: number;
  /** Asks what cannot be taken back. */
  onDanger: (verb: Danger) => void;
}

export function Head({ node, operations, onDanger }: HeadProps): ReactNode {
  const [openDialog, setDialog] = useHeadDialog();
  const close = () => setDialog("");
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
          <Actions node={node} onOpenDialog={setDialog} />
          <Menu name={`More actions for ${node.name}`} items={DANGERS.map(([verb, label]) => ({ label: `${label}…`, danger: true, refusal: refusal(verb, node), onSelect: () => onDanger(verb) }))} />
        </div>
      </div>
      <Reason node={node} />
      <DrainProgress node={node} operations={operations} />
      {openDialog === "approve" && <ApproveDialog {...dialog} />}
      {openDialog === "reject" && <RejectDialog {...dialog} />}
      {openDialog === "drain" && <DrainDialog {...dialog} />}
      {openDialog === "resume" && <ResumeDialog {...dialog} />}
      {openDialog === "install" && <InstallDialog nodeIds={[node.id]} onClose={close} />}
    </header>
  );
}

/** The buttons that are possible in this state; a refused approval shows the reason. */
function Actions({ node, onOpenDialog }: { node: LiveNode; onOpenDialog: (verb: HeadDialog) => void }): ReactNode {
  if (node.status === "pending") {
    return (
      <div className="row wrap">
        <Button kind="primary" refusal={refusal("approve", node)} onClick={() => onOpenDialog("approve")}>
          Approve…
        </Button>
        <Button refusal={refusal("reject", node)} onClick={() => onOpenDialog("reject")}>
          Reject…
        </Button>
      </div>
    );
  }
  return (
    <div className="row wrap">
      {refusal("resume", node) === "" && <Button onClick={() => onOpenDialog("resume")}>Resume…</Button>}
      {refusal("drain", node) === "" && <Button onClick={() => onOpenDialog("drain")}>Drain…</Button>}
      {refusal("install", node) === "" && <Button onClick={() => onOpenDialog("install")}>Install backend…</Button>}
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
  const drainState = drainLeft(node, operations);
  useChange(drainState?.safe === true, (previous) => {
    if (!previous && drainState?.safe === true) announce(`${node.name} can be powered off safely.`);
  });
  if (drainState === null) return null;
  return (
    <p className={`nd-drain ${drainState.safe ? "good" : ""}`}>
      <strong>{drainState.text}</strong>
      {!drainState.safe && node.drain?.deadline != null && <TimeLeft until={node.drain.deadline} />}
    </p>
  );
}

function TimeLeft({ until }: { until: string }): ReactNode {
  const now = useNow(1000);
  const seconds = (Date.parse(until) - now) / 1000;
  if (seconds <= 0) return <span> · deadline passed, stopping replicas</span>;
  return <span> · {formatTimeLeft(seconds)} until replicas are stopped</span>;
}
