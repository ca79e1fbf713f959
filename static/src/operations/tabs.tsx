// The head of the four pages of Activity: what runs, what failed, what has ended, what people changed.
import type { ReactNode } from "react";
import { NavLink } from "react-router";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import { needsAttention, type LiveState } from "../live/store";
import { PageHead } from "../ui/title";
import "./record.css";

function failures(state: LiveState): number {
  let total = 0;
  for (const operation of state.operations.values()) if (needsAttention(operation)) total += 1;
  return total;
}

interface HeadProps {
  title: string;
  note: ReactNode;
  children?: ReactNode;
}

export function ActivityHead({ title, note, children }: HeadProps): ReactNode {
  const failed = useLive(failures);
  return (
    <>
      <PageHead title={title} note={note}>
        {children}
      </PageHead>
      <nav className="tabs" aria-label="Activity">
        <NavLink to="/app/activity" end>
          Live
        </NavLink>
        <NavLink to="/app/activity/inbox">
          Inbox
          {failed > 0 && (
            <span className="badge bad">
              <span aria-hidden="true">{failed}</span>
              <span className="visually-hidden">, {count(failed, "failure")}</span>
            </span>
          )}
        </NavLink>
        <NavLink to="/app/activity/history">History</NavLink>
        <NavLink to="/app/activity/changes">Audit log</NavLink>
      </nav>
    </>
  );
}
