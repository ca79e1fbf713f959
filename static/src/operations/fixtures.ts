// Operations for the tests of this folder.
import type { Operation, OperationTarget } from "../live/messages";

export const START = Date.parse("2026-08-22T10:00:00Z");

export function at(seconds: number): string {
  return new Date(START + 1000 * seconds).toISOString();
}

let seq = 0;

/** The installation of echo on one node, changed by `more`. */
export function install(node: string, overrides: Partial<Operation> = {}, target: Partial<OperationTarget> = {}): Operation {
  seq += 1;
  const status = overrides.status ?? "processing";
  return {
    id: "echo", name: "echo", fullName: "echo", jobID: `job-${node}`, kind: "backend_install", status, progress: 0,
    taskType: "installation", isDeletion: false, isBackend: true, isQueued: status === "pending", cancellable: false,
    message: status === "pending" ? "queued" : "", attempts: 0, nextLookAt: at(0), requestID: "", actor: "admin", seq,
    createdAt: at(0), nodeID: node, nodeName: node,
    nodes: [{ node_id: node, node_name: node, status: "downloading", percentage: overrides.progress ?? 0, ...target }],
    ...overrides,
  };
}

export function byJob(...operations: Operation[]): Map<string, Operation> {
  return new Map(operations.map((operation) => [operation.jobID, operation]));
}
