// One decision of placement with its figures: what was needed, the best nodes with their terms, and the nearest misses.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import { Ago } from "../ui/time";
import { diskWords, memoryWords, needWords, signed, slotOf, type Best, type Choice, type Decision, type Miss } from "./explanation-query";

/** `kept`: when it was made, and when its figures were last read; null for one that is not kept. */
export function Details({ decision, recorded = null, name }: { decision: Decision; recorded?: Choice["recorded"]; name: string }): ReactNode {
  const { best, misses, need, nodes, selector } = decision;
  return (
    <div className="stack">
      <p className="muted anywhere">
        {nodes.feasible} of {count(nodes.considered, "node")} could take it. Needs: {needWords(need)}.
        {selector !== "" && (
          <>
            {" "}
            Only nodes of <bdi>{selector}</bdi>.
          </>
        )}
        {recorded !== null && recorded.lastAt !== recorded.at && (
          <>
            {" "}
            Figures read <Ago at={recorded.lastAt} />.
          </>
        )}
      </p>
      {best.length > 0 && <BestNodes name={name} best={best} />}
      {misses.length > 0 && <Misses name={name} misses={misses} />}
    </div>
  );
}

function Columns({ names }: { names: readonly string[] }): ReactNode {
  return (
    <thead>
      <tr>
        {names.map((name) => (
          <th key={name} scope="col">
            {name}
          </th>
        ))}
      </tr>
    </thead>
  );
}

function BestNodes({ name, best }: { name: string; best: readonly Best[] }): ReactNode {
  return (
    <div>
      <h4>Best nodes</h4>
      <table className="nd-table" aria-label={`Best nodes for ${name}`}>
        <Columns names={["Node", "Failures", "Group there", "Enough VRAM", "Replicas", "In flight", "VRAM", "Why behind"]} />
        <tbody>
          {best.map((candidate) => (
            <tr key={candidate.node_id}>
              <NodeName id={candidate.node_id} text={slotOf(candidate)} />
              <td data-label="Failures">{candidate.terms.failures}</td>
              <td data-label="Group there">{candidate.terms.shared ? "yes" : "no"}</td>
              <td data-label="Enough VRAM">{candidate.terms.has_memory ? "yes" : "no"}</td>
              <td data-label="Replicas">{candidate.terms.busy ? "some" : "none"}</td>
              <td data-label="In flight">{candidate.terms.in_flight}</td>
              <td data-label="VRAM">{memoryWords(candidate.terms)}</td>
              <td data-label="Why behind">{candidate.against === undefined ? "" : <bdi>{candidate.against}</bdi>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Misses({ name, misses }: { name: string; misses: readonly Miss[] }): ReactNode {
  return (
    <div>
      <h4>Why not there: the nearest misses</h4>
      <table className="nd-table" aria-label={`Nearest misses for ${name}`}>
        <Columns names={["Node", "Reason", "VRAM free", "Disk available", "Replicas", "In flight"]} />
        <tbody>
          {misses.map((miss) => (
            <tr key={miss.node_id}>
              <NodeName id={miss.node_id} text={miss.node} />
              <td data-label="Reason">
                <bdi>{miss.reason}</bdi>
              </td>
              <td data-label="VRAM free">{signed(miss.free_vram)}</td>
              <td data-label="Disk available">{diskWords(miss)}</td>
              <td data-label="Replicas">
                {miss.replicas} of {miss.slots}
              </td>
              <td data-label="In flight">{miss.in_flight}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Decisions outlive the nodes that they name: only one that is there has a page. */
export function NodeName({ id, text }: { id: string; text: string }): ReactNode {
  const exists = useLive((state) => state.nodes.has(id));
  const name = <bdi>{text}</bdi>;
  return <th scope="row">{exists ? <Link to={`/app/nodes/${id}`}>{name}</Link> : name}</th>;
}
