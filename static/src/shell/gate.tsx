// The gate: nothing is shown until it is known who is signed in.
import type { ReactNode } from "react";
import { Navigate, Outlet, useLocation } from "react-router";
import { Problem } from "../ui/problem";
import { usePageTitle } from "../ui/title";
import { signInPath } from "./next-address";
import { Brand } from "./nav";
import { PersonFrame } from "./person-frame";
import { useSession, type Person } from "./session";

const PASSWORD = "/app/password";

export function Gate({ children }: { children: (user: Person) => ReactNode }): ReactNode {
  const session = useSession();
  const place = useLocation();
  if (session.data === undefined) {
    if (session.error === null || session.isFetching) return <Checking />;
    return (
      <Lone title="Cannot check your session">
        <p>The server did not confirm your session.</p>
        <Problem error={session.error} onRetry={() => void session.refetch()} />
      </Lone>
    );
  }
  const user = session.data;
  if (user === null) return <Navigate to={signInPath(place)} replace />;
  if (user.mustChangePassword) {
    if (place.pathname !== PASSWORD) return <Navigate to={PASSWORD} replace state={{ next: place.pathname + place.search }} />;
    return (
      <LoneFrame>
        <Outlet />
      </LoneFrame>
    );
  }
  if (user.role !== "admin") return <PersonFrame user={user} />;
  return children(user);
}

/** As little as possible: most checks end before anybody sees it. */
export function Checking(): ReactNode {
  return (
    <div className="checking" role="status">
      <span className="spinner" aria-hidden="true" />
      <span className="visually-hidden">Checking your session</span>
    </div>
  );
}

/** A page without a shell. */
export function Lone({ title, children }: { title: string; children: ReactNode }): ReactNode {
  usePageTitle(title);
  return (
    <LoneFrame>
      <h1>{title}</h1>
      {children}
    </LoneFrame>
  );
}

export function LoneFrame({ children }: { children: ReactNode }): ReactNode {
  return (
    <main id="main" className="lone" tabIndex={-1}>
      <Brand />
      <div className="card stack">{children}</div>
    </main>
  );
}
