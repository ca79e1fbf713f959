// Where models fit, in one line; the models that come into sight together are asked for in one request.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import type { components } from "../api/schema";

export type FitSummary = components["schemas"]["ModelFitSummary"];

/** As many as one request may name. */
const MOST_MODELS = 100;
const GATHER_MS = 50;

interface Waiting {
  resolve: (summary: FitSummary) => void;
  reject: (error: unknown) => void;
}

/** A person who returns finds the fit of now. */
const KEPT_MS = 10_000;

let waiting = new Map<string, Waiting[]>();

/** Where the model fits; `staleTime` is how many ms an answer counts. */
export function useFit(model: string, options: { enabled: boolean; staleTime: number }): UseQueryResult<FitSummary> {
  return useQuery({ queryKey: ["models", "fits", model], queryFn: () => fitOf(model), gcTime: KEPT_MS, retry: false, ...options });
}

/** Resolves to where the model fits; requests of the next moment go together. */
export function fitOf(model: string): Promise<FitSummary> {
  return new Promise((resolve, reject) => {
    if (waiting.size === 0) setTimeout(sendAll, GATHER_MS);
    waiting.set(model, [...(waiting.get(model) ?? []), { resolve, reject }]);
  });
}

function sendAll(): void {
  const entries = [...waiting];
  waiting = new Map();
  for (let first = 0; first < entries.length; first += MOST_MODELS) void send(new Map(entries.slice(first, first + MOST_MODELS)));
}

async function send(batch: ReadonlyMap<string, readonly Waiting[]>): Promise<void> {
  try {
    const { models } = await call(client.POST("/api/placement/fit", { body: { models: [...batch.keys()] } }));
    for (const summary of models) for (const { resolve } of batch.get(summary.model) ?? []) resolve(summary);
  } catch (error) {
    for (const { reject } of [...batch.values()].flat()) reject(error);
  }
}
