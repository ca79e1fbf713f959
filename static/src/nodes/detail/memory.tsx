// The memory and the disk of the node as they are now.
import type { ReactNode } from "react";
import { usedRam, usedVram, vramLimit } from "../../live/gpus";
import type { LiveNode } from "../../live/messages";
import { Meter } from "../../ui/bars";
import { Panel } from "./panel";

export function Memory({ node }: { node: LiveNode }): ReactNode {
  const hasTotals = node.total_vram > 0 || node.total_ram > 0 || node.total_disk > 0;
  return (
    <Panel title="Memory">
      {!hasTotals && <p className="muted">Not reported yet. Updated with the next heartbeat.</p>}
      <div className="nd-meters">
        <Resource title="VRAM" name="VRAM used" used={usedVram(node)} reserved={node.reserved_vram} total={vramLimit(node)} />
        <Resource title="RAM" name="RAM used" used={usedRam(node)} total={node.total_ram} />
        <Resource title="Models disk" name="Models disk" used={node.total_disk - node.available_disk} total={node.total_disk} />
      </div>
    </Panel>
  );
}

interface ResourceProps {
  title: string;
  /** The meter's, for assistive tech. */
  name: string;
  used: number;
  reserved?: number;
  total: number;
}

/** A meter of what is reported. */
function Resource({ title, ...meter }: ResourceProps): ReactNode {
  if (meter.total <= 0) return null;
  return (
    <div>
      <h3>{title}</h3>
      <Meter {...meter} />
    </div>
  );
}
