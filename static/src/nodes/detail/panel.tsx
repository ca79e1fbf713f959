// A section of the page: its heading, and what it shows while it loads, after it failed and when it is old.
import type { UseQueryResult } from "@tanstack/react-query";
import { useId, type ReactNode } from "react";
import { Loading } from "../../ui/empty";
import { Problem } from "../../ui/problem";

interface PanelProps {
  title: string;
  /** Beside the heading: a button, a filter, a time. */
  aside?: ReactNode;
  className?: string;
  children: ReactNode;
}

export function Panel({ title, aside, className = "", children }: PanelProps): ReactNode {
  const id = useId();
  return (
    <section className={`nd-panel ${className}`} aria-labelledby={id}>
      <header>
        <h2 id={id}>{title}</h2>
        {aside}
      </header>
      {children}
    </section>
  );
}

interface FetchedProps<Data> {
  query: UseQueryResult<Data>;
  /** The name of the data, as in "Loading the timeline…". */
  subject: string;
  /** In the place of the data until there are some. */
  placeholder?: ReactNode;
  children: (data: Data) => ReactNode;
}

/** The data of a query; a failure with a retry above the last known state, if there is one. */
export function Fetched<Data>({ query, subject, placeholder, children }: FetchedProps<Data>): ReactNode {
  const { data, error } = query;
  if (data === undefined && error === null) {
    return (
      <>
        <div className={placeholder === undefined ? undefined : "visually-hidden"}>
          <Loading subject={subject} />
        </div>
        {placeholder}
      </>
    );
  }
  return (
    <>
      <Problem error={error} onRetry={() => void query.refetch()} />
      {data !== undefined && children(data)}
    </>
  );
}
