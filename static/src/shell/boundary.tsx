// A page that failed says so in its own place; the rest of the shell goes on.
import type { ReactNode } from "react";
import { useRouteError } from "react-router";
import { Problem } from "../ui/problem";

export function PageError(): ReactNode {
  const failure = useRouteError();
  const error = failure instanceof Error ? failure : new Error("This page failed.");
  return (
    <main className="page">
      <Problem error={error} onRetry={() => window.location.reload()} />
    </main>
  );
}
