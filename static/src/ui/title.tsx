// The name of a page: in the window's title, and as its heading with what can be done on the whole page beside it.
import { useEffect, type ReactNode } from "react";

const PRODUCT = "LocalAI Cluster";

/** Sets the window's title as long as the page is open. */
export function usePageTitle(title: string): void {
  useEffect(() => {
    document.title = title === "" ? PRODUCT : `${title} · ${PRODUCT}`;
  }, [title]);
}

interface PageHeadProps {
  title: string;
  /** Text from the network: shown in its own direction. */
  named?: boolean;
  /** A line under the heading. */
  note?: ReactNode;
  /** The page's actions, at the far side. */
  children?: ReactNode;
}

/** The heading of a page; there is one on each. */
export function PageHead({ title, named = false, note, children }: PageHeadProps): ReactNode {
  usePageTitle(title);
  return (
    <div className="page-head">
      <div className="grow">
        <h1 tabIndex={-1}>{named ? <bdi>{title}</bdi> : title}</h1>
        {note !== undefined && <div className="muted">{note}</div>}
      </div>
      {children !== undefined && <div className="row wrap">{children}</div>}
    </div>
  );
}
