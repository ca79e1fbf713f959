// The session. It is read once; after that only signing in and out, and the end of a session, change it.
import { useQuery, useQueryClient, type UseQueryResult } from "@tanstack/react-query";
import { useAction, type Action } from "../api/action";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { Listeners } from "../lib/listeners";

export type Person = components["schemas"]["Person"];

const SESSION = ["session"] as const;

/** Asks the server without touching what is known: the page decides what a change means. */
export async function fetchPerson(): Promise<Person | null> {
  return (await call(client.GET("/api/auth/status"))).user;
}

/** The person who is signed in; null for a visitor, undefined until it is known. */
export function useSession(): UseQueryResult<Person | null> {
  return useQuery({ queryKey: SESSION, queryFn: fetchPerson, staleTime: Infinity, gcTime: Infinity });
}

/** Begins anew: nothing of another account may stay in memory. */
export function reloadPage(): void {
  window.location.reload();
}

const ends = new Listeners();

/** Calls a function when it is known that this page's session is over; returns how to stop that. */
export const whenOver = ends.subscribe;

export const notifySessionEnd = ends.notify;

export interface Credentials {
  username: string;
  password: string;
}

/** Calls `onSignedIn` even if the form has been closed: the session exists all the same. */
export function useSignIn(onSignedIn: (person: Person) => void): Action<Credentials> {
  return useAction(async (body) => (await call(client.POST("/api/auth/login", { body }))).user, onSignedIn);
}

/** Stores who is signed in, from an answer of the server. */
export function useSetSession(): (person: Person) => void {
  const queries = useQueryClient();
  return (person) => queries.setQueryData(SESSION, person);
}

/** Ends the session. The page is reloaded after it, so that nothing of it stays in memory. */
export function useSignOut(): Action {
  return useAction(
    () => call(client.POST("/api/auth/logout")),
    () => window.location.assign("/login"),
  );
}

export interface PasswordChange {
  old: string;
  new: string;
}

export function useChangePassword(): Action<PasswordChange> {
  return useAction(async (body) => (await call(client.POST("/api/auth/password", { body }))).user, useSetSession());
}
