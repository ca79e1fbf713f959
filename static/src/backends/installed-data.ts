// The installed backends and their upgrades: read once, and again when the feed reports that
// something has changed.
import { keepPreviousData, useQuery, type UseQueryResult } from "@tanstack/react-query";
import { useEffect, useRef, useState } from "react";
import { call, client } from "../api/client";
import { useLive } from "../live/hooks";
import type { Installed, UpgradeInfo } from "./installed-model";

/** While a thousand nodes report, the lists are read this often and no more. */
const REST_MS = 500;

export interface InstalledData {
  installed: readonly Installed[];
  upgrades: Readonly<Record<string, UpgradeInfo>>;
}

export function useInstalled(): UseQueryResult<InstalledData> {
  const revision = useRested(useLive((state) => state.backends?.revision ?? null));
  return useQuery({
    // A list read at a revision is at least as new as it; the previous lists stay until it is there.
    queryKey: ["backends", "installed", revision],
    placeholderData: keepPreviousData,
    // The lists of a thousand nodes at each revision would fill the memory of the browser.
    gcTime: 0,
    queryFn: async ({ signal }) => {
      const [installed, upgrades] = await Promise.all([call(client.GET("/backends", { signal })), call(client.GET("/api/backends/upgrades", { signal }))]);
      return { installed, upgrades };
    },
  });
}

/** The value as of a moment ago: one that moves all the time is followed every `REST_MS`. */
function useRested<Value>(value: Value): Value {
  const [rested, setRested] = useState(value);
  const latest = useRef(value);
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);
  useEffect(() => {
    latest.current = value;
    if (Object.is(value, rested)) return;
    timer.current ??= setTimeout(() => {
      timer.current = undefined;
      setRested(latest.current);
    }, REST_MS);
  }, [value, rested]);
  useEffect(() => () => {
    clearTimeout(timer.current);
    timer.current = undefined;
  }, []);
  return rested;
}

/** Has the galleries read again; the outcome comes with the feed. */
export function checkForUpgrades(): Promise<unknown> {
  return call(client.POST("/api/backends/upgrades/check"));
}
