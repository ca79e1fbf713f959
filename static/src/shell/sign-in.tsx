// A place for this page.
import type { ReactNode } from "react";

export function SignInPage(): ReactNode {
  return <h1>SignInPage</h1>;
}
