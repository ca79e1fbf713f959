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
      <Empty title="Page not found">
        <p className="anywhere">
          Nothing was found at <code>{pathname}</code>. It may have been removed, or the address may contain a typo.
        </p>
        <Link className="button" to="/app/overview">
          Go to the overview
        </Link>
      </Empty>
    </>
  );
}
