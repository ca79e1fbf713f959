// The messages of /ws/feed, typed by the same document as REST. Patches name only the keys that changed.
import type { components } from "../api/schema";

type Schemas = components["schemas"];

export type Fact = Schemas["Fact"];
export type LiveNode = Schemas["LiveNode"];
export type LiveNodePatch = Schemas["LiveNodePatch"];
export type LiveModel = LiveNode["models"][number];
export type NodeStatus = LiveNode["status"];
export type Operation = Schemas["Operation"];
export type OperationTarget = NonNullable<Operation["nodes"]>[number];
export type Notice = Schemas["Notice"];
export type BackendsMessage = Schemas["FeedBackends"];
export type FeedMessage = Schemas["FeedMessage"];
