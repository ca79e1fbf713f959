// A place for this page.
import type { ReactNode } from "react";

export function NodesPage(): ReactNode {
  return <h1>NodesPage</h1>;
}
