// A session that ends under an open page: the person signs in again over it, so that nothing typed is lost, and the
// feed and the failed questions start again. For another account the page is reloaded.
import { useQueryClient } from "@tanstack/react-query";
import { useCallback, useContext, useEffect, useRef, useState, type ReactNode, type RefObject } from "react";
import { whenSignedOut } from "../api/client";
import { LiveContext, useChange, useLive } from "../live/hooks";
import { Button } from "../ui/button";
import { Dialog } from "../ui/dialog";
import { Banner } from "./banners";
import { fetchPerson, notifySessionEnd, reloadPage, useSetSession, type Person } from "./session";
import { SignInForm } from "./sign-in-form";

/** A session reported as ended again this soon after a check is over. */
const TWICE_MS = 10_000;

export function SessionEnd({ user, onBack }: { user: Person; onBack?: () => void }): ReactNode {
  const [over, setOver] = useState(false);
  const [aside, setAside] = useState(false);
  const held = useRef(-Infinity);
  const back = useBack(user, () => {
    held.current = performance.now();
    setOver(false);
    onBack?.();
  });
  useEnd(back, held, () => {
    notifySessionEnd();
    setOver(true);
    setAside(false);
  });
  useSomebodyElse(user);
  useReturn(over, back);
  if (!over) return null;
  return (
    <>
      {aside && (
        <Banner level="error" text="Your session has ended." hint="The page no longer updates, and changes are not possible.">
          <Button small onClick={() => setAside(false)}>
            Sign in
          </Button>
        </Banner>
      )}
      <Dialog
        open={!aside}
        onClose={() => setAside(true)}
        title="Your session has ended"
        description="Sign in again. Your place and your input are kept."
      >
        <SignInForm name={user.name} onSignedIn={back} />
        <p className="muted">Signing in with another account reloads the page.</p>
      </Dialog>
    </>
  );
}

type Back = (person: Person) => void;

/** The reaction once it is known who is signed in. */
function useBack(user: Person, goOn: () => void): Back {
  const store = useContext(LiveContext);
  const queries = useQueryClient();
  const setSession = useSetSession();
  return (person) => {
    if (person.id !== user.id) {
      reloadPage();
      return;
    }
    setSession(person);
    store.lost("connecting");
    goOn();
    void queries.invalidateQueries({ predicate: (query) => query.state.status === "error" });
  };
}

/**
 * Hears of the end from answers and from the feed; asks first, because a changed password also ends the old one.
 * `held`: when the session was last found to hold, ms of this page.
 */
function useEnd(back: Back, held: RefObject<number>, end: () => void): void {
  const latest = useRef({ back, end });
  const isFetching = useRef(false);
  useEffect(() => {
    latest.current = { back, end };
  });
  const [check] = useState(() => async (sentAt: number) => {
    // A late answer to a request of the previous session.
    if (isFetching.current || sentAt < held.current) return;
    isFetching.current = true;
    const person = performance.now() - held.current < TWICE_MS ? null : await fetchPerson().catch(() => null);
    isFetching.current = false;
    if (person === null) {
      latest.current.end();
      return;
    }
    latest.current.back(person);
  });
  useEffect(() => whenSignedOut((sentAt) => void check(sentAt)), [check]);
  const connection = useLive((state) => state.connection);
  useChange(connection, () => {
    if (connection === "signed-out") void check(performance.now());
  });
}

/**
 * Another account may have signed in, in another tab, whose answers this page would then show: asks after a cut of the
 * feed, which does not say whose it is, and when a person comes back to this tab.
 */
function useSomebodyElse(user: Person): void {
  const connection = useLive((state) => state.connection);
  const setSession = useSetSession();
  const compare = useCallback(
    async (goOn: (person: Person) => void = () => undefined) => {
      const person = await fetchPerson().catch(() => null);
      if (person === null) return;
      if (person.id === user.id) goOn(person);
      else reloadPage();
    },
    [user.id],
  );
  useChange(connection, (previous) => {
    if (connection === "live" && previous === "stale") void compare();
    // The permission may be gone: then the gate shows it.
    if (connection === "forbidden") void compare(setSession);
  });
  useEffect(() => {
    const comes = () => {
      if (!document.hidden) void compare();
    };
    document.addEventListener("visibilitychange", comes);
    return () => document.removeEventListener("visibilitychange", comes);
  }, [compare]);
}

/** Signing in in another tab is enough. */
function useReturn(over: boolean, back: Back): void {
  const latest = useRef(back);
  useEffect(() => {
    latest.current = back;
  });
  useEffect(() => {
    if (!over) return;
    const checkIdle = () => {
      if (document.hidden) return;
      void fetchPerson().then((person) => person !== null && latest.current(person), () => undefined);
    };
    document.addEventListener("visibilitychange", checkIdle);
    return () => document.removeEventListener("visibilitychange", checkIdle);
  }, [over]);
}
