// The requests about models; where they run comes with the feed.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import type { Definition } from "./rows";

type Installed = components["schemas"]["InstalledModels"];

/** The model definitions. Files change without notice: they are read when a page opens and when a person returns to it. */
export function useDefinitions(): UseQueryResult<Definition[]> {
  return useQuery({
    queryKey: ["models", "definitions"],
    queryFn: ({ signal }) => call(client.GET("/api/models/capabilities", { signal })),
    refetchOnWindowFocus: true,
    select: definedIn,
  });
}

/** Models that only nodes have come with the feed. */
function definedIn(installed: Installed): Definition[] {
  return installed.data.filter((definition) => definition.source === undefined);
}

export interface Load {
  model: string;
  /** This many more replicas; absent: at least one serves or is being loaded. */
  replicas?: number;
  node_id?: string;
}

/** Requests loads; the answer does not wait for them, the feed reports them. */
export function loadModel(load: Load): Promise<unknown> {
  return call(client.POST("/backend/load", { body: { ...load, wait: false } }));
}

/** Has all replicas unloaded; the same. */
export function unloadModel(model: string): Promise<unknown> {
  return call(client.POST("/api/nodes/models/unload", { body: { model_name: model, wait: false } }));
}
