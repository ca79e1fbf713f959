// Asks before a person leaves a model's page with changes of its definition that are not saved.
import { useEffect, type ReactNode } from "react";
import { matchPath, useBlocker } from "react-router";
import { Confirm } from "../ui/dialog";

/** The tabs of the model keep the changes: only another page asks. */
export function LeaveQuestion({ name, enabled }: { name: string; enabled: boolean }): ReactNode {
  const blocker = useBlocker(({ nextLocation }) => enabled && matchPath("/app/models/:name/:tab?", nextLocation.pathname)?.params.name !== name);
  useEffect(() => {
    if (!enabled) return;
    const ask = (event: BeforeUnloadEvent) => event.preventDefault();
    window.addEventListener("beforeunload", ask);
    return () => window.removeEventListener("beforeunload", ask);
  }, [enabled]);
  if (blocker.state !== "blocked") return null;
  return (
    <Confirm open danger title="Leave without saving?" action="Leave" back="Stay" onClose={() => blocker.reset()} onConfirm={() => blocker.proceed()}>
      <p>Your changes to the definition will be lost.</p>
    </Confirm>
  );
}
