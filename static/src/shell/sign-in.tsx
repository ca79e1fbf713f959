// The sign-in page. It leads back to where the person wanted to go, if that is a page of this host.
import type { ReactNode } from "react";
import { useSearchParams } from "react-router";
import { Checking, Lone } from "./gate";
import { Onward } from "./redirect";
import { useSession, useSetSession } from "./session";
import { SignInForm } from "./sign-in-form";
import "./shell.css";

export function SignInPage(): ReactNode {
  const session = useSession();
  const setSession = useSetSession();
  const [search] = useSearchParams();
  if (session.data === undefined && session.isFetching) return <Checking />;
  if (session.data !== undefined && session.data !== null) {
    return <Onward address={search.get("next")} />;
  }
  return (
    <Lone title="Sign in">
      <SignInForm onSignedIn={setSession} />
    </Lone>
  );
}
