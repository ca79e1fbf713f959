// The state of work in waves, and the models that its next nodes would take out of service. Pure.
import type { LiveNode, Operation, OperationTarget } from "../live/messages";
import { usersOf } from "../nodes/detail/words";
import { timeOfDay } from "./silence";
import { ENDED, ownState } from "./words";

export interface Standing {
  state: NonNullable<Operation["waves"]>["state"];
  /** As people count: the canary is the first. */
  number: number;
  count: number;
  isCanary: boolean;
  /** Nodes of the open wave. */
  open: readonly OperationTarget[];
  /** Nodes whose wave comes later. */
  later: readonly OperationTarget[];
}

/** Null unless it goes in waves. */
export function waveProgress({ waves, nodes = [] }: Pick<Operation, "waves" | "nodes">): Standing | null {
  if (waves === undefined) return null;
  const numbers = [...new Set(nodes.flatMap(({ wave }) => (wave === undefined ? [] : [wave])))].sort((left, right) => left - right);
  return {
    state: waves.state,
    number: Math.max(numbers.indexOf(waves.open), 0) + 1,
    count: waves.count,
    isCanary: waves.canary && waves.open === 0,
    open: nodes.filter(({ wave }) => wave === waves.open),
    later: nodes.filter((target) => target.wave !== undefined && target.wave > waves.open && !ENDED.has(ownState(target))),
  };
}

/** The running wave and what the other nodes wait for, in a sentence. */
export function waitOf({ state, number, count, open, later }: Standing): string {
  if (later.length === 0) return "";
  const pauseEnd = open.every((target) => ENDED.has(ownState(target))) ? later.map((target) => target.nextLookAt ?? "").sort().at(-1) : "";
  if (state !== "asks" && pauseEnd) return `Pause until ${timeOfDay(Date.parse(pauseEnd))}, then wave ${number + 1} of ${count}.`;
  const waitingText = later.length === 1 ? "1 node waits" : `${later.length} nodes wait`;
  if (state === "asks") {
    const failed = open.some((target) => ownState(target) === "error");
    return `Wave ${number} of ${count} ${failed ? "failed" : "was partly cancelled"}: ${waitingText} for your decision.`;
  }
  return `${waitingText} until wave ${number} of ${count} is done.`;
}

/** Models of the backend on these nodes that no other healthy node serves and that are not confirmed yet. */
export function lastReplicas(operation: Pick<Operation, "name" | "waves">, targets: readonly OperationTarget[], nodes: ReadonlyMap<string, LiveNode>): string[] {
  const endingModels = new Set<string>();
  for (const target of targets) {
    const node = nodes.get(target.node_id);
    if (node === undefined) continue;
    for (const { model_name: model } of usersOf(node, operation.name)) {
      const isServedByOther = [...nodes.values()].some(
        (candidate) => candidate.id !== node.id && candidate.status === "healthy" && candidate.models.some((replica) => replica.model_name === model && replica.state === "loaded"),
      );
      if (!isServedByOther) endingModels.add(model);
    }
  }
  for (const model of operation.waves?.lastReplicas ?? []) endingModels.delete(model);
  return [...endingModels].sort();
}
