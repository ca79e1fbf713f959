// A place for this page.
import type { ReactNode } from "react";

export function BackendsPage(): ReactNode {
  return <h1>BackendsPage</h1>;
}
