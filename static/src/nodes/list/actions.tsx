// The actions of the list: the menu of one node, and the dialog of each verb.
import type { ReactNode } from "react";
import { ACTIONS } from "../../api/actions";
import type { LiveNode } from "../../live/messages";
import type { MenuItem } from "../../ui/menu";
import { ApproveDialog, DrainDialog, LabelDialog, RejectDialog, RemoveDialog, ResumeDialog } from "../shared/dialogs";
import type { NodesDialogProps } from "../shared/verb-dialog";
import { refusal, type Verb } from "../shared/verbs";

/** The verbs that the list offers; the others are on the page of a node. */
export type ListVerb = Exclude<Verb, "stop" | "rotate" | "revoke">;

export interface Action {
  verb: ListVerb;
  nodes: readonly LiveNode[];
}

export const VERB_LABELS: Readonly<Record<ListVerb, string>> = {
  approve: ACTIONS.approve.title,
  reject: ACTIONS.reject.title,
  drain: ACTIONS.drain.title,
  resume: ACTIONS.resume.title,
  label: "Label",
  install: "Install",
  deregister: ACTIONS.remove.title,
};

export const LIST_VERBS: readonly ListVerb[] = ["approve", "reject", "drain", "resume", "label", "install", "deregister"];
/** Verbs that are worth a line in the menu only when they make sense. */
const WHEN_POSSIBLE = new Set<ListVerb>(["approve", "reject", "resume"]);

/** The menu of one node. */
export function menuOf(node: LiveNode, act: (action: Action) => void, open: () => void): MenuItem[] {
  const offered = LIST_VERBS.filter((verb) => !WHEN_POSSIBLE.has(verb) || refusal(verb, node) === "");
  const items = offered.map((verb) => ({
    label: `${VERB_LABELS[verb]}…`,
    refusal: refusal(verb, node),
    danger: verb === "deregister",
    onSelect: () => act({ verb, nodes: [node] }),
  }));
  return [{ label: "Open", onSelect: open }, ...items];
}

/** Why the verb cannot be done to any of them; "" if it can to one. */
export function refusalOfAll(verb: ListVerb, nodes: readonly LiveNode[]): string {
  const reasons = new Set<string>();
  for (const node of nodes) {
    const reason = refusal(verb, node);
    if (reason === "") return "";
    reasons.add(reason);
  }
  const [only] = reasons;
  return reasons.size === 1 && only !== undefined ? `Not possible for any selected node: ${only}` : "Not possible for any selected node";
}

const DIALOGS: Readonly<Record<Exclude<ListVerb, "install">, (props: NodesDialogProps) => ReactNode>> = {
  approve: ApproveDialog,
  reject: RejectDialog,
  drain: DrainDialog,
  resume: ResumeDialog,
  label: LabelDialog,
  deregister: RemoveDialog,
};

/** The dialog of a requested action. */
export function ActionDialog({ action, onClose }: { action: Action; onClose: () => void }): ReactNode {
  if (action.verb === "install") return null;
  const VerbDialog = DIALOGS[action.verb];
  return <VerbDialog nodes={action.nodes} onClose={onClose} />;
}
