// Nothing to show: says so, and what to do next. Waiting: says for what, and never without an end.
import type { ReactNode } from "react";

export function Empty({ title, children }: { title: string; children?: ReactNode }): ReactNode {
  return (
    <div className="empty">
      <strong>{title}</strong>
      {children}
    </div>
  );
}

export function Loading({ subject }: { subject: string }): ReactNode {
  return (
    <p className="row muted" role="status">
      <span className="spinner" aria-hidden="true" /> Loading {subject}…
    </p>
  );
}

/** An empty cell; assistive tech reads the reason. */
export function Dash({ why }: { why: string }): ReactNode {
  return (
    <span className="muted" title={why}>
      <span aria-hidden="true">–</span>
      <span className="visually-hidden">{why}</span>
    </span>
  );
}
