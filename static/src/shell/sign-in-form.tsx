// Name and password, with what is wrong said where it is typed: the page of its own and the dialog over a page share
// it. A wrong password keeps the name; too many wrong ones count down.
import { useEffect, useId, useRef, useState, type ComponentProps, type ReactNode, type SubmitEvent } from "react";
import { ApiError } from "../api/client";
import { Button } from "../ui/button";
import { useSignIn, type Person } from "./session";

interface SignInFormProps {
  /** Filled in already. */
  name?: string;
  onSignedIn: (person: Person) => void;
}

export function SignInForm({ name = "", onSignedIn }: SignInFormProps): ReactNode {
  const signIn = useSignIn(onSignedIn);
  const [username, setUsername] = useState(name);
  const [password, setPassword] = useState("");
  const passwordField = useRef<HTMLInputElement>(null);
  const errorId = useId();
  const wait = useWait(signIn.error);
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (signIn.busy || wait > 0) return;
    const failed = () => {
      // The person may have started retyping already.
      if (passwordField.current?.value === password) passwordField.current.select();
    };
    signIn.run({ username, password }, undefined, failed);
  };
  const isInvalid = signIn.error instanceof ApiError && signIn.error.status === 401;
  const marks = { "aria-invalid": isInvalid || undefined, "aria-describedby": signIn.error === null ? undefined : errorId };
  return (
    <form className="stack" onSubmit={submit}>
      <UsernameField autoFocus={name === ""} value={username} onChange={(event) => setUsername(event.target.value)} {...marks} />
      <label className="field">
        <span>Password</span>
        <input
          ref={passwordField}
          className="input"
          name="password"
          type="password"
          autoComplete="current-password"
          required
          autoFocus={name !== ""}
          data-first={name !== "" || undefined}
          value={password}
          onChange={(event) => setPassword(event.target.value)}
          {...marks}
        />
      </label>
      {signIn.error !== null && (
        <p className="problem" id={errorId} role="alert">
          {words(signIn.error)}
        </p>
      )}
      <Button type="submit" kind="primary" busy={signIn.busy} refusal={wait > 0 ? `Try again in ${wait} s` : ""}>
        {wait > 0 ? `Sign in (in ${wait} s)` : "Sign in"}
      </Button>
    </form>
  );
}

function UsernameField(input: ComponentProps<"input">): ReactNode {
  return (
    <label className="field">
      <span>Username</span>
      <input className="input" name="username" autoComplete="username" autoCapitalize="none" spellCheck={false} required {...input} />
    </label>
  );
}

function words(error: Error): string {
  if (!(error instanceof ApiError)) return error.message;
  if (error.status === 401) return "Incorrect username or password.";
  if (error.status === 429) return "Too many failed sign-ins from this address. Try again later.";
  if (error.status === 0) return "The server is unreachable. Your input is kept; try again.";
  return error.message;
}

/** Seconds until a refused person may try again. */
function useWait(error: Error | null): number {
  const [until, setUntil] = useState({ error, at: 0 });
  const [now, setNow] = useState(0);
  if (until.error !== error) {
    const seconds = error instanceof ApiError && error.status === 429 ? error.retryAfter || 60 : 0;
    setUntil({ error, at: seconds });
    setNow(0);
  }
  const waiting = until.at > now;
  useEffect(() => {
    if (!waiting) return;
    const timer = setInterval(() => setNow((previous) => previous + 1), 1000);
    return () => clearInterval(timer);
  }, [waiting]);
  return Math.max(0, until.at - now);
}
