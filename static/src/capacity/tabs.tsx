// The two views of capacity: the fleet as it is, and as it could be.
import type { ReactNode } from "react";
import { Tabs } from "../ui/tabs";

const MAP = "/app/capacity";
const WHAT_IF = `${MAP}/what-if`;
const TABS = [
  { to: MAP, title: "Map" },
  { to: WHAT_IF, title: "What if" },
];

/** `part`: the end of the page's address; "" for the first one. */
export function CapacityTabs({ part }: { part: "" | "what-if" }): ReactNode {
  return <Tabs label="Capacity" tabs={TABS} current={part === "" ? MAP : WHAT_IF} />;
}
