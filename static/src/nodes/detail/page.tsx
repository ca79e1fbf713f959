// A place for this page.
import type { ReactNode } from "react";

export function NodePage(): ReactNode {
  return <h1>NodePage</h1>;
}
