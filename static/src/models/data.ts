// The requests about models; where they run comes with the feed.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import type { Definition } from "./rows";

type Installed = components["schemas"]["InstalledModels"];
type DefinitionError = components["schemas"]["DefinitionError"];

/** The model definitions. Files change without notice: they are read when a page opens and when a person returns to it. */
export function useDefinitions(): UseQueryResult<Definition[]> {
  return useInstalled(definedIn);
}

/** Files of the models folder that cannot be used, read with the definitions. */
export function useBrokenDefinitions(): UseQueryResult<DefinitionError[]> {
  return useInstalled(brokenIn);
}

function useInstalled<T>(select: (installed: Installed) => T): UseQueryResult<T> {
  return useQuery({
    queryKey: ["models", "definitions"],
    queryFn: ({ signal }) => call(client.GET("/api/models/capabilities", { signal })),
    refetchOnWindowFocus: true,
    select,
  });
}

/** Models that only nodes have come with the feed. */
function definedIn(installed: Installed): Definition[] {
  return installed.data.filter((definition) => definition.source === undefined);
}

function brokenIn(installed: Installed): DefinitionError[] {
  return installed.definitionErrors;
}

/** Requests the load of one replica; the answer does not wait for it, the feed reports it. */
export function loadModel(model: string): Promise<unknown> {
  return call(client.POST("/backend/load", { body: { model, wait: false } }));
}

/** Has all replicas unloaded; the same. */
export function unloadModel(model: string): Promise<unknown> {
  return call(client.POST("/api/nodes/models/unload", { body: { model_name: model, wait: false } }));
}
