// What is asked of the server about models; where they run comes with the feed.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import type { Definition } from "./rows";

/** What is defined. Files change without a word: they are read when a page opens and when a person comes back to it. */
export function useDefinitions(): UseQueryResult<Definition[]> {
  return useQuery({
    queryKey: ["models", "definitions"],
    queryFn: async ({ signal }) => {
      const { data } = await call(client.GET("/api/models/capabilities", { signal }));
      // What only nodes have comes with the feed.
      return data.filter((one) => one.source === undefined);
    },
    refetchOnWindowFocus: true,
  });
}

/** Has one replica loaded; the answer does not wait for it, the feed tells. */
export function loadModel(model: string): Promise<unknown> {
  return call(client.POST("/backend/load", { body: { model, wait: false } }));
}

/** Has all replicas unloaded; the same. */
export function unloadModel(model: string): Promise<unknown> {
  return call(client.POST("/api/nodes/models/unload", { body: { model_name: model, wait: false } }));
}
