// The messages of /ws/feed, typed by the same document as REST. Patches name only the keys that changed.
import type { components } from "../api/schema";

type Schemas = components["schemas"];

export interface Fact {
  at: string;
  by: string;
  reason: string;
}

export interface LiveModel {
  id: string;
  model_name: string;
  replica_index: number;
  state: "staging" | "loading" | "loaded" | "unloading" | "idle";
  in_flight: number;
  backend_type: string;
  last_used: string;
}

export interface LiveNode {
  id: string;
  name: string;
  node_type: "backend" | "agent";
  status: Schemas["NodeStatus"];
  reason: string;
  since: string | null;
  address: string;
  http_address: string;
  gpu_vendor: string;
  gpu_compute_capability: string;
  capability: string;
  total_vram: number;
  available_vram: number;
  reserved_vram: number;
  vram_budget: string;
  vram_budget_bytes: number;
  vram_budget_manually_set: boolean;
  total_ram: number;
  available_ram: number;
  total_disk: number;
  available_disk: number;
  max_replicas_per_model: number;
  max_replicas_per_model_manually_set: boolean;
  last_heartbeat: string | null;
  created_at: string;
  labels: Record<string, string>;
  models: LiveModel[];
  model_count: number;
  in_flight_count: number;
  backends: string[];
  inventory_at: string | null;
  weak_identity: boolean;
  fingerprint: string;
  source_address: string;
  rejected: Fact | null;
  revoked: Fact | null;
  drain: { since: string; by: string; reason: string; own: boolean; deadline: string | null } | null;
  open_conflicts: number;
  rotation_requested_at: string | null;
  revision: number;
}

export type LiveNodePatch = Partial<LiveNode> & { id: string };
export type NodeStatus = LiveNode["status"];
export type Operation = Schemas["Operation"] & { dismissedAt?: string };
export type OperationTarget = NonNullable<Operation["nodes"]>[number];
export interface Notice {
  id: string;
  level: "warning" | "error";
  text: string;
  hint: string;
}

export type FeedMessage =
  | { type: "hello"; at: string; build: string; version: string; user: { name: string; role: string } }
  | { type: "operations.snapshot"; seq: number; operations: Operation[] }
  | { type: "operations.delta"; seq: number; operations: Operation[] }
  | { type: "nodes.snapshot"; cursor: string; nodes: LiveNode[] }
  | { type: "nodes.delta"; cursor: string; changed: LiveNodePatch[]; removed: string[] }
  | { type: "notices"; notices: Notice[] }
  | { type: "alive"; at: string };
