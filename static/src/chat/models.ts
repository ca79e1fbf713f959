// The models of the chat, and their states. Pure.
import type { Definition } from "../models/rows";
import { count } from "../lib/format";

export function canChat({ capabilities }: Pick<Definition, "capabilities">): boolean {
  return !capabilities.includes("FLAG_EMBEDDINGS");
}

/** The page with this model chosen. */
export function chatAddress(model: string): string {
  return `/app/chat?model=${encodeURIComponent(model)}`;
}

/** "2 replicas loaded" */
export function stateWords(replicas: number): string {
  return replicas === 0 ? "not loaded" : `${count(replicas, "replica")} loaded`;
}
