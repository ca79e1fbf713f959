// A live state for tests: nodes as the feed sends them, and a store that has them.
import type { LiveModel, LiveNode } from "./messages";
import { LiveStore } from "./store";

export const GIB = 1024 ** 3;
const REGISTERED = "2026-08-22T10:00:00Z";

/** A healthy node that has reported nothing, changed by `more`. */
export function node(name: string, overrides: Partial<LiveNode> = {}): LiveNode {
  return {
    id: name, name, node_type: "backend", status: "healthy", reason: "", since: null, address: "10.0.0.1:50051", http_address: "",
    gpus: [], gpu_vendor: "", gpu_compute_capability: "", capability: "", total_vram: 0, available_vram: 0, reserved_vram: 0, vram_budget: "",
    vram_budget_bytes: 0, vram_budget_manually_set: false, total_ram: 0, available_ram: 0, total_disk: 0, available_disk: 0,
    disk_quota: "", disk_quota_bytes: 0,
    max_replicas_per_model: 2, max_replicas_per_model_manually_set: false, last_heartbeat: REGISTERED, created_at: REGISTERED,
    labels: {}, models: [], model_count: 0, in_flight_count: 0, backends: [], inventory_at: null, weak_identity: false,
    fingerprint: "abcd1234", source_address: "10.0.0.1", rejected: null, revoked: null, drain: null, open_conflicts: 0,
    rotation_requested_at: null, revision: 1, joined: null, worker_version: "", version_skew: "", inventory_error: "", file_port: null, departed_engines: 0,
    departed_until: null, ...overrides,
  };
}

export function model(name: string, replica: number, overrides: Partial<LiveModel> = {}): LiveModel {
  const usual = { model_name: name, replica_index: replica, state: "loaded", phase: "serving", in_flight: 0, vram_needed: 0, backend_type: "llama-cpp" } as const;
  return { id: `${name}-${replica}`, last_used: REGISTERED, created_at: REGISTERED, ...usual, ...overrides };
}

/** Gives the store these nodes; it shows them with its next frame. */
export function show(store: LiveStore, ...nodes: LiveNode[]): LiveStore {
  store.push({ type: "nodes.snapshot", cursor: "e:1", nodes });
  return store;
}
