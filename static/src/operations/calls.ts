// What a person can do about an operation, as calls to the server.
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import type { Operation } from "../live/messages";

type Accepted = components["schemas"]["Accepted"];

/** Dismisses a failure for all users. */
export function dismiss(operation: Operation): Promise<unknown> {
  return call(client.POST("/api/operations/{job_id}/dismiss", { params: { path: { job_id: operation.jobID } } }));
}

/** Asks one node for a backend; joins what is under way there. */
export function installOn(nodeID: string, backend: string): Promise<Accepted> {
  // What was asked for by an address is known by that address.
  const body = backend.includes("://") ? { uri: backend } : { backend };
  const path = { node_id: nodeID };
  return call(client.POST("/api/nodes/{node_id}/backends/install", { params: { path }, body }));
}

/** Whether it can be asked for again; removals and loads cannot (a load comes again with its request). */
export function canRetry(operation: Operation): boolean {
  return operation.kind === "backend_install" && operation.status === "failed" && (operation.nodeID ?? "") !== "";
}

/** Asks for the same again on its own node; the server puts the failure away for it. */
export function retry(operation: Operation): Promise<Accepted> {
  return installOn(operation.nodeID ?? "", operation.fullName);
}

/** Runs `work` on every item, at most eight at a time, all of them; raises what the first that failed says. */
export async function inTurn<Item>(items: readonly Item[], work: (item: Item) => Promise<unknown>): Promise<void> {
  const failures: Error[] = [];
  const waiting = [...items];
  const worker = async () => {
    for (let item = waiting.shift(); item !== undefined; item = waiting.shift()) {
      try {
        await work(item);
      } catch (error) {
        failures.push(error instanceof Error ? error : new Error(String(error)));
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(8, items.length) }, worker));
  const [first] = failures;
  if (first !== undefined) throw first;
}
