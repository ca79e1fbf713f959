// The conditions behind the status, each with time, actor and reason; then the node's identity and hardware.
import type { UseQueryResult } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { bytes, count } from "../../lib/format";
import { driversOf } from "../../live/gpus";
import type { LiveNode } from "../../live/messages";
import { Ago } from "../../ui/time";
import { Fact, Fingerprint, JoinedWith, Risk, Version } from "../shared/identity";
import type { NodeDetail } from "./data";
import { Fetched, Panel } from "./panel";
import { conditions, type Condition } from "./words";

interface Props {
  node: LiveNode;
  detail: UseQueryResult<NodeDetail>;
}

export function Conditions({ node, detail }: Props): ReactNode {
  return (
    <Panel title="Conditions">
      <ul className="nd-conditions">
        {conditions(node, detail.data).map((condition) => (
          <Row key={condition.id} condition={condition} />
        ))}
        <li>
          <span className={`pill ${heartbeatTone(node)}`}>Heartbeat</span>
          <span>
            <Ago at={node.last_heartbeat} intervalMs={1000} />
            {node.last_heartbeat !== null && <span className="muted">, reported by the worker</span>}
          </span>
        </li>
        {node.open_conflicts > 0 && (
          <li>
            <span className="pill bad">Identity conflict</span>
            <span>
              {count(node.open_conflicts, "claim")} to this node awaiting a decision
            </span>
          </li>
        )}
      </ul>
      <Fetched query={detail} subject="the node's history">
        {() => null}
      </Fetched>
    </Panel>
  );
}

function heartbeatTone(node: LiveNode): string {
  if (node.status === "offline") return "bad";
  // Those of a revoked secret are refused: the last one is old and gets older.
  return node.last_heartbeat === null || node.revoked !== null ? "warn" : "good";
}

function Row({ condition }: { condition: Condition }): ReactNode {
  return (
    <li>
      <span className={`pill ${condition.tone}`}>{condition.title}</span>
      <span>
        {condition.at !== null && <Ago at={condition.at} />} <bdi>{condition.by}</bdi>
        {condition.reason !== "" && (
          <>
            : <bdi>{condition.reason}</bdi>
          </>
        )}
        {condition.next != null && (
          <span className="muted">
            ; next check <Ago at={condition.next} intervalMs={1000} />
          </span>
        )}
      </span>
    </li>
  );
}

export function Identity({ node, detail }: Props): ReactNode {
  const { bound_at: bound, instance } = detail.data?.identity ?? {};
  return (
    <Panel title="Identity">
      {node.status === "pending" && <Risk node={node} />}
      <dl className="facts">
        <Fact name="Fingerprint">
          {node.weak_identity ? <span className="pill warn">shared token only</span> : <Fingerprint hex={node.fingerprint} />}
        </Fact>
        <Fact name="Registered from">
          <span className="mono">{node.source_address || "unknown"}</span>
        </Fact>
        <JoinedWith node={node} />
        <Version node={node} />
        {node.http_address !== "" && (
          <Fact name="HTTP">
            <bdi className="mono">{node.http_address}</bdi>
          </Fact>
        )}
        <Fact name="First seen">
          <Ago at={node.created_at} />
        </Fact>
        {node.rotation_requested_at !== null && (
          <Fact name="Rotation">
            requested <Ago at={node.rotation_requested_at} />; not completed by the worker yet
          </Fact>
        )}
        <Fact name="Node id">
          <span className="mono">{node.id}</span>
        </Fact>
        {bound !== undefined && node.fingerprint !== "" && (
          <Fact name="Secret bound">
            <Ago at={bound} />
          </Fact>
        )}
        {instance !== undefined && (
          <Fact name="Process">
            <bdi className="mono">{instance}</bdi>
          </Fact>
        )}
      </dl>
      <Fetched query={detail} subject="the identity">
        {() => null}
      </Fetched>
    </Panel>
  );
}

function amount(number: number | undefined, noun: string): string {
  return number === undefined ? "" : count(number, noun);
}

export function Hardware({ node, detail }: Props): ReactNode {
  const system = detail.data?.system ?? {};
  const rows: [string, string][] = [
    ["GPU", node.gpu_vendor || "none"],
    ["Compute", node.gpu_compute_capability],
    ["GPU driver", driversOf(node)],
    ["Capability", node.capability],
    ["VRAM", node.total_vram > 0 ? bytes(node.total_vram) : ""],
    ["RAM", node.total_ram > 0 ? bytes(node.total_ram) : ""],
    ["Models disk", node.total_disk > 0 ? bytes(node.total_disk) : ""],
    ["Processor", [system.cpu, amount(system.cpu_cores, "core"), amount(system.cpu_count, "thread")].filter(Boolean).join(", ")],
    ["System", [system.os, system.kernel].filter(Boolean).join(", ")],
  ];
  return (
    <Panel title="Hardware" aside={<span className="muted">reported by the worker</span>}>
      <dl className="facts">
        {rows.map(
          ([name, value]) =>
            value !== "" && (
              <Fact key={name} name={name}>
                <bdi>{value}</bdi>
              </Fact>
            ),
        )}
        {system.booted_at !== undefined && (
          <Fact name="Booted">
            <Ago at={system.booted_at} />
          </Fact>
        )}
      </dl>
    </Panel>
  );
}
