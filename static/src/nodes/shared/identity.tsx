// The identity of a worker and the risk, as an approver must see them.
import type { ReactNode } from "react";
import { bytes, grouped } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { Ago } from "../../ui/time";
import { CopyButton } from "../../ui/copy";
import { isAutomatic } from "./labels";
import { LabelChips } from "./names";
import "./shared.css";

export const RISK =
  "Anyone who has this worker's secret receives your models and prompts. " +
  "Compare the fingerprint with the one in the worker's log.";

export const WEAK_RISK =
  "This worker has no secret of its own. Anyone who knows the registration token can claim to be this node " +
  "and receive your models and prompts.";

/** The hardware in one line; what was not reported is left out. */
export function hardware(node: LiveNode): string {
  const parts = [
    node.gpu_vendor === "" ? "no GPU" : node.gpu_vendor,
    node.gpu_compute_capability === "" ? "" : `compute ${node.gpu_compute_capability}`,
    node.total_vram > 0 ? `${bytes(node.total_vram)} VRAM` : "",
    node.total_ram > 0 ? `${bytes(node.total_ram)} RAM` : "",
    node.total_disk > 0 ? `${bytes(node.total_disk)} disk` : "",
  ];
  return parts.filter((part) => part !== "").join(" · ");
}

/** A fingerprint in groups of four, wrapped rather than cut, with a button that copies it without the blanks. */
export function Fingerprint({ hex }: { hex: string }): ReactNode {
  if (hex === "") return <span className="muted">none</span>;
  return (
    <span className="fingerprint">
      <code>{grouped(hex)}</code>
      <CopyButton small text={hex} />
    </span>
  );
}

/** One fact: its name and what it is. */
export function Fact({ name, children }: { name: string; children: ReactNode }): ReactNode {
  return (
    <div className="fact">
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** Everything an approver needs of a worker. */
export function IdentityFacts({ node }: { node: LiveNode }): ReactNode {
  const labels = Object.entries(node.labels).filter(([key]) => !isAutomatic(key));
  return (
    <dl className="facts">
      <Fact name="Fingerprint">
        {node.weak_identity ? <span className="pill warn">shared token only</span> : <Fingerprint hex={node.fingerprint} />}
      </Fact>
      <Fact name="Source address">
        <span className="mono">{node.source_address || "unknown"}</span>
        {node.address !== "" && (
          <>
            {" · Advertises "}
            <bdi className="mono">{node.address}</bdi>
          </>
        )}
      </Fact>
      <JoinedWith node={node} />
      <Version node={node} />
      <Fact name="Hardware">{node.node_type === "agent" ? "agent" : hardware(node)}</Fact>
      <Fact name="First seen">
        <Ago at={node.created_at} />
      </Fact>
      {labels.length > 0 && (
        <Fact name="Labels">
          <LabelChips labels={labels} className="tag name" />
        </Fact>
      )}
      {node.rejected !== null && (
        <Fact name="Rejected">
          <Ago at={node.rejected.at} /> by <bdi>{node.rejected.by}</bdi>: <bdi>{node.rejected.reason}</bdi>
        </Fact>
      )}
      {node.revoked !== null && (
        <Fact name="Secret revoked">
          <Ago at={node.revoked.at} /> by <bdi>{node.revoked.by}</bdi>
          {node.revoked.reason !== "" && (
            <>
              : <bdi>{node.revoked.reason}</bdi>
            </>
          )}
        </Fact>
      )}
    </dl>
  );
}

/** The join token that it registered with, if it was one. */
export function JoinedWith({ node }: { node: LiveNode }): ReactNode {
  if (node.joined === null) return null;
  return (
    <Fact name="Joined with">
      token <bdi>{node.joined.note || node.joined.token.slice(0, 8)}</bdi>, made by <bdi>{node.joined.by}</bdi>
    </Fact>
  );
}

/** The worker's version, and what is odd about it. */
export function Version({ node }: { node: LiveNode }): ReactNode {
  return (
    <Fact name="Version">
      {node.worker_version === "" ? <span className="muted">unknown</span> : <bdi>{node.worker_version}</bdi>}{" "}
      {node.version_skew !== "" && <span className="pill warn">{node.version_skew}</span>}
    </Fact>
  );
}

/** The risk of letting this worker in. */
export function Risk({ node }: { node: LiveNode }): ReactNode {
  return <p className="risk">{node.weak_identity ? WEAK_RISK : RISK}</p>;
}
