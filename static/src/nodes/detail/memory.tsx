// Memory of the node over the last hour, as the server has kept it and the heartbeats go on to tell it, and the disk as it is.
import { lazy, Suspense, useContext, useEffect, useMemo, useState, type ReactNode } from "react";
import { bytes, span } from "../../lib/format";
import { LiveContext } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { Meter } from "../../ui/bars";
import { useKept } from "./data";
import { Panel } from "./panel";
import { EVERY_MS, range, sampled, usedRam, usedVram, vramLimit, withKept, withSample, type Sample } from "./samples";

/** Without its code the figures are enough. */
const Spark = lazy(() => import("./spark").catch(() => ({ default: () => null })));

export function Memory({ node }: { node: LiveNode }): ReactNode {
  const live = useSamples(node.id);
  const stored = useKept(node.id);
  const ring = useMemo(() => withKept(stored, live), [stored, live]);
  const hasTotals = node.total_vram > 0 || node.total_ram > 0 || node.total_disk > 0;
  return (
    <Panel title="Memory" aside={<span className="muted">{sinceWhen(ring)}</span>}>
      {!hasTotals && <p className="muted">Not reported yet. Updated with the next heartbeat.</p>}
      {node.total_vram > 0 && (
        <Figure name="VRAM" now={usedVram(node)} total={vramLimit(node)} ring={ring} of="vram" />
      )}
      {node.total_ram > 0 && <Figure name="RAM" now={usedRam(node)} total={node.total_ram} ring={ring} of="ram" />}
      {node.total_disk > 0 && (
        <div className="stack">
          <h3>Models disk</h3>
          <Meter name="Models disk" used={node.total_disk - node.available_disk} total={node.total_disk} />
        </div>
      )}
    </Panel>
  );
}

/** A sample every few seconds, as long as the page is open. */
function useSamples(id: string): readonly Sample[] {
  const store = useContext(LiveContext);
  const [ring, setRing] = useState<readonly Sample[]>([]);
  useEffect(() => {
    const take = () => {
      const { nodes, connection, skew } = store.read();
      const sample = sampled(nodes.get(id), connection === "live", Date.now() + skew);
      setRing((current) => withSample(current, sample));
    };
    take();
    const timer = setInterval(take, EVERY_MS);
    return () => clearInterval(timer);
  }, [store, id]);
  return ring;
}

function sinceWhen(ring: readonly Sample[]): string {
  const [first, last] = [ring[0], ring.at(-1)];
  if (first === undefined || last === undefined) return "";
  return `last ${span(Math.max(last.at - first.at, EVERY_MS / 1000))}`;
}

interface FigureProps {
  name: string;
  now: number;
  total: number;
  ring: readonly Sample[];
  of: "vram" | "ram";
}

function Figure({ name, now, total, ring, of }: FigureProps): ReactNode {
  const values = ring.map((sample) => sample[of]);
  const bounds = range(values);
  const words = `${bytes(now)} of ${bytes(total)}`;
  const between = bounds === null || bounds.low === bounds.high ? "" : `, between ${bytes(bounds.low)} and ${bytes(bounds.high)}`;
  return (
    <div className="nd-figure">
      <div className="row spread">
        <h3>{name} used</h3>
        <span>{words}</span>
      </div>
      <div role="img" aria-label={`${name} used: ${words}${between}`}>
        <Suspense fallback={<div className="nd-spark" />}>
          <Spark at={ring.map((sample) => sample.at)} values={values} total={total} />
        </Suspense>
      </div>
    </div>
  );
}
