// The nodes as of a moment ago: a table of five hundred is not redrawn for every heartbeat.
import { useContext, useEffect, useState } from "react";
import { LiveContext } from "../live/hooks";
import type { LiveNode } from "../live/messages";
import { EMPTY } from "../live/store";

const REST_MS = 500;

export type NodesById = ReadonlyMap<string, LiveNode>;

/** True if the feed has sent the nodes; an empty map before that does not mean that there are none. */
export function isLoaded(nodes: NodesById): boolean {
  return nodes !== EMPTY.nodes;
}

export function useThrottledNodes(): NodesById {
  const store = useContext(LiveContext);
  const [nodes, setNodes] = useState(() => store.read().nodes);
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let shown: NodesById = EMPTY.nodes;
    const show = () => {
      timer = undefined;
      shown = store.read().nodes;
      setNodes(shown);
    };
    // The first ones are shown at once: the page waits for them.
    const soon = () => (timer ??= setTimeout(show, isLoaded(shown) ? REST_MS : 0));
    soon();
    const stop = store.subscribe(soon);
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [store]);
  return nodes;
}
