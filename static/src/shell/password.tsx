// A place for this page.
import type { ReactNode } from "react";

export function PasswordPage(): ReactNode {
  return <h1>PasswordPage</h1>;
}
