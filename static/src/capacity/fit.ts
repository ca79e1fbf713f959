// The fit of one more replica of a model, node by node, from the server's placement. It is requested when a model is
// chosen, and again when something has changed that placement looks at; memory that breathes with each heartbeat counts
// by steps only, or it would be asked every second.
import { keepPreviousData, useQuery, type UseQueryResult } from "@tanstack/react-query";
import { useDeferredValue, useEffect, useRef, useState } from "react";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import type { LiveNode } from "../live/messages";

export type Fit = components["schemas"]["ModelFit"];

export interface Verdict {
  tone: "good" | "warn" | "bad";
  /** In a word, for the cell. */
  mark: string;
  words: string;
}

const GIB = 1024 ** 3;
/** Milliseconds during which changes are gathered before the next request. */
const GATHER_MS = 1500;

/** The state on which the fit depends. */
export function versionOf(nodes: Iterable<LiveNode>): string {
  const parts: string[] = [];
  for (const node of nodes) {
    const room = Math.floor((node.available_vram - node.reserved_vram) / GIB);
    const disk = Math.floor(node.available_disk / (10 * GIB));
    parts.push(`${node.id}:${node.revision}:${node.status}:${node.models.length}:${room}:${disk}`);
  }
  return parts.join(" ");
}

/** The value, at most every `GATHER_MS`; the last one always. */
function useGathered(value: string): string {
  const [gathered, setGathered] = useState(value);
  const latest = useRef(value);
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => {
    latest.current = value;
    if (value === gathered || timer.current !== undefined) return;
    timer.current = setTimeout(() => {
      timer.current = undefined;
      setGathered(latest.current);
    }, GATHER_MS);
  }, [value, gathered]);
  useEffect(
    () => () => {
      clearTimeout(timer.current);
      timer.current = undefined;
    },
    [],
  );
  return gathered;
}

export function useFit(model: string, nodes: ReadonlyMap<string, LiveNode>): UseQueryResult<Fit> {
  const deferredModel = useDeferredValue(model.trim());
  const version = useGathered(deferredModel === "" ? "" : versionOf(nodes.values()));
  return useQuery({
    queryKey: ["capacity", "fit", deferredModel, version],
    queryFn: ({ signal }) => call(client.GET("/api/placement/fit/{model}", { params: { path: { model: deferredModel } }, signal })),
    enabled: deferredModel !== "",
    // The picture of before stays until the next one is there, but never that of another model.
    placeholderData: (previous) => (previous?.model === deferredModel ? keepPreviousData(previous) : undefined),
    gcTime: 0,
  });
}

/** The verdict on each node. */
export function verdicts(fit: Fit | undefined): ReadonlyMap<string, Verdict> | null {
  if (fit === undefined) return null;
  return new Map(
    fit.nodes.map(({ node_id: id, reason, enough_vram: enough }): [string, Verdict] => {
      if (reason !== "") return [id, { tone: "bad", mark: "no", words: reason }];
      return [id, enough ? { tone: "good", mark: "fits", words: "one more replica fits" } : { tone: "warn", mark: "tight", words: "possible, but less VRAM is free than the model needs" }];
    }),
  );
}
