// Join tokens over REST, and what can be said of a machine that joins with one: pure, from its live row.
import { call, client } from "../../api/client";
import type { components } from "../../api/schema";
import type { LiveNode } from "../../live/messages";

export type JoinToken = components["schemas"]["JoinToken"];
export type MadeJoinToken = components["schemas"]["MadeJoinToken"];

export const MOST_USES = 1000;
export const LONGEST_NOTE = 200;
/** The choices for the validity of a token, in seconds. */
export const LIFETIMES: readonly (readonly [seconds: number, words: string])[] = [
  [600, "10 minutes"],
  [3600, "1 hour"],
  [86400, "1 day"],
  [7 * 86400, "7 days"],
];

export interface TokenRequest {
  lifetime: number;
  uses: number;
  note: string;
}

/** Makes a token; the answer is the only place where it is. */
export function make({ lifetime, uses, note }: TokenRequest): Promise<MadeJoinToken> {
  const body = { lifetime_seconds: lifetime, uses, note: note.trim(), url: window.location.origin };
  return call(client.POST("/api/join-tokens", { body }));
}

/** It admits no new node any more. */
export function revoke(id: string) {
  return call(client.DELETE("/api/join-tokens/{token_id}", { params: { path: { token_id: id } } }));
}

/** The latest tokens, newest first. */
export function list(): Promise<JoinToken[]> {
  return call(client.GET("/api/join-tokens", { params: { query: {} } }));
}

/** The nodes that registered with the token, the first one first. */
export function joined(nodes: Iterable<LiveNode>, token: string): LiveNode[] {
  return [...nodes].filter((node) => node.joined?.token === token).sort((left, right) => (left.created_at < right.created_at ? -1 : 1));
}

/** The problem with a typed number of uses; "" if there is none. */
export function usesProblem(text: string): string {
  const number = Number(text);
  return Number.isInteger(number) && number >= 1 && number <= MOST_USES ? "" : `Enter 1 to ${MOST_USES}.`;
}

export interface Check {
  id: "registered" | "approved" | "heartbeat" | "bus" | "address";
  state: "ok" | "waiting" | "failed";
  text: string;
  /** The advice. */
  advice: string;
}

/** The steps to a working node, with the state of each. */
export function checks(node: LiveNode): Check[] {
  const approval = approved(node);
  return [
    { id: "registered", state: "ok", text: "Registered", advice: "" },
    approval,
    heartbeatCheck(node),
    onBus(node, approval.state === "ok"),
    reachable(node),
  ];
}

/** True if it works: approved, and it has answered a command. */
export function isConnected(node: LiveNode): boolean {
  return approved(node).state === "ok" && node.inventory_at !== null;
}

function approved(node: LiveNode): Check {
  const base = { id: "approved", text: "Approved", advice: "" } as const;
  if (node.rejected !== null) return { ...base, state: "failed", advice: `Rejected by ${node.rejected.by}.` };
  if (node.status !== "pending") return { ...base, state: "ok" };
  return { ...base, state: "waiting", advice: "Compare the fingerprint with the one in the worker's log, then approve." };
}

/** A registration counts as a sign of life, too: the first heartbeat comes after it. */
function heartbeatCheck(node: LiveNode): Check {
  const base = { id: "heartbeat", text: "Heartbeat", advice: "" } as const;
  if (node.status === "offline") return { ...base, state: "failed", advice: node.reason };
  const beats = node.last_heartbeat !== null && Date.parse(node.last_heartbeat) > Date.parse(node.created_at);
  return { ...base, state: beats ? "ok" : "waiting" };
}

function onBus(node: LiveNode, isApproved: boolean): Check {
  const base = { id: "bus", text: "Answers commands", advice: "" } as const;
  if (node.inventory_at !== null) return { ...base, state: "ok" };
  if (!isApproved) return { ...base, state: "waiting", advice: "Starts after the approval." };
  if (node.inventory_error === "") return { ...base, state: "waiting" };
  return { ...base, state: "failed", advice: `${node.inventory_error}. Check that the worker reaches the message bus (NATS). The worker's log has the reason.` };
}

function reachable(node: LiveNode): Check {
  const base = { id: "address", text: "Its address is reachable", advice: "" } as const;
  const host = node.address.replace(/:\d+$/, "");
  if (node.file_port !== null) {
    return { ...base, state: "failed", advice: `${node.file_port.error}. Check the machine's firewall, and LOCALAI_ADVERTISE_HTTP_ADDR on that machine.` };
  }
  if (node.model_count > 0) return { ...base, state: "ok" };
  if (isLoopback(host) && node.source_address !== "" && !isLoopback(node.source_address)) {
    const advice = `The worker advertises ${node.address}, which only its own machine can reach. Set LOCALAI_ADVERTISE_ADDR there.`;
    return { ...base, state: "failed", advice };
  }
  const odd = isAddress(host) && node.source_address !== "" && host !== node.source_address;
  const note = odd ? ` The worker advertises ${host}, but connects from ${node.source_address}.` : "";
  return { ...base, state: "waiting", advice: `Checked when the first model is loaded there.${note}` };
}

/** True if only the machine itself can reach it. */
export function isLoopback(host: string): boolean {
  return /^(localhost|\[?::1\]?|127\.\d+\.\d+\.\d+|::ffff:127\..*)$/i.test(host);
}

function isAddress(host: string): boolean {
  return /^\d+\.\d+\.\d+\.\d+$/.test(host);
}
