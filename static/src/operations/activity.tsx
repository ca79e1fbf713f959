// A place for this page.
import type { ReactNode } from "react";

export function ActivityPage(): ReactNode {
  return <h1>ActivityPage</h1>;
}
