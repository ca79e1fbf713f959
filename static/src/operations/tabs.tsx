// The head of the four pages of Activity: what runs, what failed, what has ended, what people changed.
import type { ReactNode } from "react";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import { needsAttention, type LiveState } from "../live/store";
import { Tabs } from "../ui/tabs";
import { PageHead } from "../ui/title";
import "./record.css";

function failures(state: LiveState): number {
  let total = 0;
  for (const operation of state.operations.values()) if (needsAttention(operation)) total += 1;
  return total;
}

const LIVE = "/app/activity";

interface HeadProps {
  /** The end of the page's address; "" for the first one. */
  part: "" | "inbox" | "history" | "changes";
  title: string;
  note: ReactNode;
  children?: ReactNode;
}

export function ActivityHead({ part, title, note, children }: HeadProps): ReactNode {
  const failed = useLive(failures);
  return (
    <>
      <PageHead title={title} note={note}>
        {children}
      </PageHead>
      <Tabs
        label="Activity"
        current={part === "" ? LIVE : `${LIVE}/${part}`}
        tabs={[
          { to: LIVE, title: "Live" },
          { to: `${LIVE}/inbox`, title: "Inbox", mark: failed > 0 && <Failures number={failed} /> },
          { to: `${LIVE}/history`, title: "History" },
          { to: `${LIVE}/changes`, title: "Audit log" },
        ]}
      />
    </>
  );
}

function Failures({ number }: { number: number }): ReactNode {
  return (
    <span className="badge bad">
      <span aria-hidden="true">{number}</span>
      <span className="visually-hidden">, {count(number, "failure")}</span>
    </span>
  );
}
