// A page that failed says so in its own place; the rest of the shell goes on. Code that is not there any more after
// an update is no fault of the page: reloading helps.
import type { ReactNode } from "react";
import { isRouteErrorResponse, useLocation, useNavigate, useRouteError } from "react-router";
import { MissingPage } from "../ui/lazy";
import { Problem } from "../ui/problem";
import { PageHead } from "../ui/title";
import { LoneFrame } from "./gate";
import { NotFound } from "./not-found";
import "./shell.css";

/** True if a failure is that of loading a page's code, in the words of the browsers. */
export function isMissingCode(failure: unknown): boolean {
  if (!(failure instanceof Error)) return false;
  return /dynamically imported module|importing a module script failed|unable to preload/i.test(failure.message);
}

/** In the place of a page. */
export function PageError(): ReactNode {
  const failure = useRouteError();
  const navigate = useNavigate();
  const place = useLocation();
  if (isRouteErrorResponse(failure) && failure.status === 404) return <NotFound />;
  if (isMissingCode(failure)) return <MissingPage />;
  return (
    <>
      <PageHead title="This page failed" />
      <Problem error={asError(failure)} onRetry={() => void navigate(place, { replace: true })} />
    </>
  );
}

/** In the place of everything, if the shell itself failed. */
export function AppError(): ReactNode {
  const failure = useRouteError();
  return (
    <LoneFrame>
      {isMissingCode(failure) ? (
        <MissingPage />
      ) : (
        <>
          <PageHead title="The page failed" />
          <Problem error={asError(failure)} onRetry={() => window.location.reload()} />
        </>
      )}
    </LoneFrame>
  );
}

function asError(failure: unknown): Error {
  return failure instanceof Error ? failure : new Error("Unknown error");
}
