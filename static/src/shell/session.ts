// Who is signed in. The server is asked once; after that only signing in and out, and the end of a session, change it.
import { useMutation, useQuery, useQueryClient, type UseMutationResult, type UseQueryResult } from "@tanstack/react-query";
import type { Client } from "openapi-fetch";
import { call, client } from "../api/client";

export interface Person {
  id: string;
  email: string;
  name: string;
  role: "admin" | "user";
  mustChangePassword: boolean;
}

interface Answer<Body> {
  responses: { 200: { content: { "application/json": Body } } };
}
interface Post<Sent, Body> {
  post: Answer<Body> & { requestBody: { content: { "application/json": Sent } } };
}
interface SessionPaths {
  "/api/auth/status": { get: Answer<{ user: Person | null }> };
  "/api/auth/login": Post<{ username: string; password: string }, { user: Person }>;
  "/api/auth/logout": { post: Answer<{ message: string }> };
  "/api/auth/password": Post<{ old: string; new: string }, { user: Person }>;
}
const api = client as unknown as Client<SessionPaths>;

const SESSION = ["session"] as const;

async function ask(): Promise<Person | null> {
  return (await call(api.GET("/api/auth/status"))).user;
}

/** Who is signed in; null for nobody, undefined as long as it is not known. */
export function useSession(): UseQueryResult<Person | null> {
  return useQuery({ queryKey: SESSION, queryFn: ask, staleTime: Infinity, gcTime: Infinity });
}

/** Asks the server again without touching what is known: the page decides what a change means. */
export function askAgain(): Promise<Person | null> {
  return ask();
}

export interface Credentials {
  username: string;
  password: string;
}

export function useSignIn(): UseMutationResult<Person, Error, Credentials> {
  return useMutation({
    mutationFn: async (body: Credentials) => (await call(api.POST("/api/auth/login", { body }))).user,
  });
}

/** Says who is signed in now, after an answer of the server that told it. */
export function useSetSession(): (person: Person) => void {
  const queries = useQueryClient();
  return (person) => queries.setQueryData(SESSION, person);
}

/** Ends the session. The page is loaded anew after it, so that nothing of it stays in memory. */
export function useSignOut(): UseMutationResult<unknown, Error, void> {
  return useMutation({
    mutationFn: () => call(api.POST("/api/auth/logout")),
    onSuccess: () => window.location.assign("/login"),
  });
}

export interface PasswordChange {
  old: string;
  new: string;
}

export function useChangePassword(): UseMutationResult<Person, Error, PasswordChange> {
  const setSession = useSetSession();
  return useMutation({
    mutationFn: async (body: PasswordChange) => (await call(api.POST("/api/auth/password", { body }))).user,
    onSuccess: setSession,
  });
}
