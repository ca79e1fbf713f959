// The sign-in page. It leads back to where the person wanted to go, if that is a page of this one.
import type { ReactNode } from "react";
import { Navigate, useSearchParams } from "react-router";
import { Checking, Lone } from "./gate";
import { safeNext } from "./next";
import { useSession, useSetSession } from "./session";
import { SignInForm } from "./sign-in-form";
import "./shell.css";

export function SignInPage(): ReactNode {
  const session = useSession();
  const setSession = useSetSession();
  const [search] = useSearchParams();
  if (session.data === undefined && session.isFetching) return <Checking />;
  if (session.data !== undefined && session.data !== null) {
    return <Navigate to={safeNext(search.get("next"), window.location.origin)} replace />;
  }
  return (
    <Lone title="Sign in">
      <SignInForm onSignedIn={setSession} />
    </Lone>
  );
}
