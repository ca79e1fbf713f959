// The cluster in one line: how many nodes, how many of them serve, how much GPU memory is in use.
import { memo, type ReactNode } from "react";
import { bytes, count } from "../../lib/format";
import type { LiveNode } from "../../live/messages";

export interface Sums {
  nodes: number;
  healthy: number;
  draining: number;
  usedVram: number;
  totalVram: number;
}

/** Memory counts where there is any: a node without a GPU adds nothing. */
export function summed(nodes: Iterable<LiveNode>): Sums {
  const sums = { nodes: 0, healthy: 0, draining: 0, usedVram: 0, totalVram: 0 };
  for (const node of nodes) {
    sums.nodes += 1;
    if (node.status === "healthy") sums.healthy += 1;
    if (node.status === "draining") sums.draining += 1;
    if (node.total_vram <= 0) continue;
    sums.usedVram += node.total_vram - node.available_vram;
    sums.totalVram += node.total_vram;
  }
  return sums;
}

export const Pulse = memo(function Pulse({ nodes }: { nodes: ReadonlyMap<string, LiveNode> }): ReactNode {
  const sums = summed(nodes.values());
  const parts = [count(sums.nodes, "node"), `${sums.healthy} healthy`];
  if (sums.draining > 0) parts.push(`${sums.draining} draining`);
  if (sums.totalVram > 0) parts.push(`${bytes(sums.usedVram)} of ${bytes(sums.totalVram)} VRAM in use`);
  return (
    <span className="pulse" data-testid="pulse">
      {parts.join(" · ")}
    </span>
  );
});
