// The parts of a page as a row of links: each part has an address of its own.
import type { ReactNode } from "react";
import { Link } from "react-router";

interface Tab {
  to: string;
  title: string;
  /** Behind the title, such as a number. */
  mark?: ReactNode;
}

interface TabsProps {
  label: string;
  tabs: readonly Tab[];
  /** The address of the tab that is shown. */
  current: string;
}

export function Tabs({ label, tabs, current }: TabsProps): ReactNode {
  return (
    <nav className="tabs" aria-label={label}>
      {tabs.map(({ to, title, mark }) => (
        <Link key={to} to={to} aria-current={to === current ? "page" : undefined}>
          {title}
          {mark}
        </Link>
      ))}
    </nav>
  );
}
