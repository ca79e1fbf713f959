// Requests that a person has sent from the picker, by backend and node. They live outside it: closing the dialog
// stops nothing and forgets nothing, and opening it again for the same backend shows how they went.
import { useSyncExternalStore } from "react";
import { ApiError, type NodeRefusal } from "../api/client";
import { Listeners } from "../lib/listeners";
import { install, type WaveOptions } from "../operations/calls";
import { keyOf, type Address } from "./address";
import type { Sent } from "./picker-model";

export type Run = ReadonlyMap<string, Sent>;

const NONE: Run = new Map();

/** True if it was not requested from this dialog. */
export function isTheirs(sent: Sent | undefined): boolean {
  return sent === undefined || (sent.step === "accepted" && sent.theirs === true);
}

export class Runs {
  private readonly runs = new Map<string, Run>();
  private readonly changes = new Listeners();

  constructor(private readonly send: (nodeIDs: readonly string[], backend: string, waves: WaveOptions | null) => Promise<{ jobID: string }>) {}

  readonly subscribe = this.changes.subscribe;

  readonly of = (backend: string): Run => this.runs.get(backend) ?? NONE;

  /**
   * Asks for the backend on these nodes: one request and one operation, which goes on without this page. If nodes cannot
   * take it, nothing starts: answers the others.
   */
  async start(backend: string, nodeIDs: readonly string[], waves: WaveOptions | null = null): Promise<readonly string[]> {
    if (nodeIDs.length === 0) return [];
    const setEach = (sent: Sent) => this.set(backend, nodeIDs.map((id) => [id, sent]));
    setEach({ step: "sending" });
    try {
      const { jobID } = await this.send(nodeIDs, backend, waves);
      setEach({ step: "accepted", jobID, at: Date.now() });
    } catch (error) {
      const refusals = error instanceof ApiError ? error.refusals : [];
      if (refusals.length > 0) return this.refuse(backend, nodeIDs, refusals);
      setEach({ step: "refused", error: error instanceof Error ? error : new Error(String(error)) });
    }
    return [];
  }

  private refuse(backend: string, nodeIDs: readonly string[], refusals: readonly NodeRefusal[]): readonly string[] {
    const refusedIDs = new Set(refusals.map((node) => node.id));
    const others = nodeIDs.filter((id) => !refusedIDs.has(id));
    this.forget(backend, others);
    this.set(backend, refusals.map(({ id, reason }) => [id, { step: "refused", error: new ApiError(reason, 409) }]));
    return others;
  }

  /**
   * Follows operations that run already, so that their end shows as well; keeps what it knows. What was refused may
   * run all the same: a request whose answer was lost, or somebody else's.
   */
  adopt(backend: string, jobs: Iterable<readonly [nodeID: string, jobID: string]>): void {
    const run = this.of(backend);
    const now = Date.now();
    const fresh = [...jobs].filter(([nodeID, jobID]) => {
      const sent = run.get(nodeID);
      return sent?.step !== "sending" && !(sent?.step === "accepted" && sent.jobID === jobID);
    });
    if (fresh.length > 0) this.set(backend, fresh.map(([nodeID, jobID]) => [nodeID, { step: "accepted", jobID, at: now, theirs: isTheirs(run.get(nodeID)) }]));
  }

  /** Clears the requests of these nodes. */
  forget(backend: string, nodeIDs: readonly string[]): void {
    if (nodeIDs.length === 0) return;
    const remaining = new Map(this.of(backend));
    for (const id of nodeIDs) remaining.delete(id);
    this.put(backend, remaining);
  }

  private set(backend: string, entries: readonly (readonly [string, Sent])[]): void {
    this.put(backend, new Map([...this.of(backend), ...entries]));
  }

  private put(backend: string, run: Run): void {
    this.runs.set(backend, run);
    this.changes.notify();
  }
}

/** The chosen addresses by name. */
const addresses = new Map<string, Address>();

/** Makes runs of this backend install from the address; returns its name. */
export function byAddress(address: Address): string {
  const key = keyOf(address);
  addresses.set(key, address);
  return key;
}

/** Makes runs of this backend use the galleries. */
export function byName(backend: string): string {
  addresses.delete(backend);
  return backend;
}

export function addressOf(backend: string): Address | undefined {
  return addresses.get(backend);
}

export const runs = new Runs((nodeIDs, backend, waves) => install(nodeIDs, addresses.get(backend) ?? backend, waves));

export function useRun(backend: string): Run {
  return useSyncExternalStore(runs.subscribe, () => runs.of(backend));
}
