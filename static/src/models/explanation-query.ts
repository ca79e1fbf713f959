// Why a model runs where it does: what the server says of its placements, when that is read, and in which words its
// figures are shown. Pure but for `useExplained`.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { useEffect, useRef } from "react";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { bytes } from "../lib/format";
import type { ModelRow } from "./rows";

type Schemas = components["schemas"];
export type Explained = Schemas["ModelExplained"];
export type Decision = Schemas["PlacementDecision"];
export type Best = Schemas["PlacementBest"];
export type Miss = Schemas["PlacementMiss"];

/** The state on which the reasons depend: replicas and the model's operations, not requests and progress. */
export function versionOf({ places, active, failed }: Pick<ModelRow, "places" | "active" | "failed">): string {
  const replicas = places.map(({ node, model }) => [node.id, model.id, model.replica_index, model.state]);
  const work = [...active, ...failed].map((operation) => [operation.jobID, operation.status, operation.phase, operation.attempts, operation.status === "waiting_for_nodes" ? operation.message : ""]);
  return JSON.stringify([replicas, work]);
}

/** Reads when it is first drawn, and again when `version` has changed: one read at a time, the last change always. */
export function useExplained(model: string, version: string): UseQueryResult<Explained> {
  const requestedModel = useRef("");
  const query = useQuery({
    queryKey: ["models", "explained", model],
    queryFn: ({ signal }) => {
      requestedModel.current = version;
      return call(client.GET("/api/models/{model}/explain", { params: { path: { model } }, signal }));
    },
  });
  const { isFetching, refetch } = query;
  useEffect(() => {
    // A change during a read may have come too late for its answer. A read that failed is not repeated for the same version.
    if (!isFetching && requestedModel.current !== version) void refetch();
  }, [isFetching, refetch, version]);
  return query;
}

/** A decision to look at. */
export interface Choice {
  key: string;
  decision: Decision;
  /** When it was made, and when its figures were last read; null for the one that would be made now. */
  recorded: { at: string; lastAt: string } | null;
}

export const NOW = "now";

/** The decision of now, then the recorded ones, the latest first. */
export function choicesOf({ next, records }: Explained): Choice[] {
  const choices = records.map((record) => ({ key: String(record.id), decision: record, recorded: { at: record.at, lastAt: record.last_at } }));
  return next.placement === null ? choices : [{ key: NOW, decision: next.placement, recorded: null }, ...choices];
}

/** "n1#0" */
export function slotOf(place: { node: string | null; replica_index: number | null }): string {
  return `${place.node ?? ""}#${place.replica_index ?? 0}`;
}

/** "8 GiB of VRAM if possible, 9 GiB of disk" */
export function needWords({ vram, vram_required, disk, disk_required }: Decision["need"]): string {
  const requirement = (size: number, resource: string, required: boolean) => (size > 0 ? [`${bytes(size)} of ${resource}${required ? "" : " if possible"}`] : []);
  return [...requirement(vram, "VRAM", vram_required), ...requirement(disk, "disk", disk_required)].join(", ") || "not known";
}

/** VRAM on a node that is ranked: what is free, or merely available if what is needed is not free there. */
export function memoryWords({ has_memory, memory }: Best["terms"]): string {
  return `${signed(memory)} ${has_memory ? "free" : "available"}`;
}

/** Less than nothing is free where more is reserved than available. */
export function signed(size: number): string {
  return size < 0 ? `−${bytes(-size)}` : bytes(size);
}

export function diskWords({ available_disk, promised_bytes = 0, total_disk }: Miss): string {
  const taken = Math.min(promised_bytes, available_disk);
  return total_disk === 0 ? "not reported" : `${bytes(available_disk)} of ${bytes(total_disk)}${taken > 0 ? `, ${bytes(taken)} for other loads` : ""}`;
}

/** What files of models take of the node's quota for them. */
export function quotaWords({ disk_quota = 0, quota_used = 0 }: Miss): string {
  return disk_quota === 0 ? "no quota" : `${bytes(quota_used)} of ${bytes(disk_quota)}`;
}
