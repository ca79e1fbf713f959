// An address of which nothing is known.
import type { ReactNode } from "react";
import { Link, useLocation } from "react-router";
import { Empty } from "../ui/empty";
import { PageHead } from "../ui/title";

export function NotFound(): ReactNode {
  const { pathname } = useLocation();
  return (
    <>
      <PageHead title="Not found" />
      <Empty title="There is no such page">
        <p className="anywhere">
          Nothing is at <code>{pathname}</code>. It may have been removed, or the address is mistyped.
        </p>
        <Link className="button" to="/app/nodes">
          Go to Nodes
        </Link>
      </Empty>
    </>
  );
}
