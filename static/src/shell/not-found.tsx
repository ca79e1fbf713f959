// A place for this page.
import type { ReactNode } from "react";

export function NotFound(): ReactNode {
  return <h1>NotFound</h1>;
}
