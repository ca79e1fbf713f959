// Changing one's password: by choice, or because it was generated and is good for nothing else until it is changed.
import { useId, useState, type ComponentProps, type ReactNode, type SubmitEvent } from "react";
import { useLocation, useSearchParams } from "react-router";
import { ApiError } from "../api/client";
import { Button } from "../ui/button";
import { Problem } from "../ui/problem";
import { PageHead } from "../ui/title";
import { useOnward } from "./onward";
import { useChangePassword, useSession, useSignOut } from "./session";

export function PasswordPage(): ReactNode {
  const { data: user } = useSession();
  const [forced] = useState(user?.mustChangePassword === true);
  if (user === undefined || user === null) return null;
  return (
    <>
      <PageHead title="Change password" />
      {forced && <p>Your password was generated. Choose your own; until then there is nothing else you can do here.</p>}
      <PasswordForm name={user.name} forced={forced} />
    </>
  );
}

function PasswordForm({ name, forced }: { name: string; forced: boolean }): ReactNode {
  const [old, setOld] = useState("");
  const [next, setNext] = useState("");
  const [repeat, setRepeat] = useState("");
  const [differ, setDiffer] = useState(false);
  const change = useChangePassword();
  const onward = useOnward();
  const wanted = useWanted();
  const said = fieldErrors(change.error);
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    setDiffer(next !== repeat);
    if (next !== repeat || change.isPending) return;
    const done = () => {
      for (const clear of [setOld, setNext, setRepeat]) clear("");
      // At once: the gate shows another page as soon as it knows.
      if (forced) onward(wanted);
    };
    change.mutate({ old, new: next }, { onSuccess: done });
  };
  return (
    <form className="stack narrow" onSubmit={submit}>
      {/* Tells a password manager whose password it is. */}
      <input hidden readOnly name="username" autoComplete="username" value={name} />
      <Secret label="Present password" autoComplete="current-password" value={old} onText={setOld} error={said.old} />
      <Secret label="New password" autoComplete="new-password" value={next} onText={setNext} error={said.new} />
      <Secret
        label="New password again"
        autoComplete="new-password"
        value={repeat}
        onText={setRepeat}
        error={differ && next !== repeat ? "This is not the same password." : ""}
      />
      {change.error !== null && said.elsewhere && <Problem error={change.error} />}
      <p role="status">{change.isSuccess ? "The password is changed. Your other sessions have ended." : ""}</p>
      <div className="row wrap">
        <Button type="submit" kind="primary" busy={change.isPending}>
          Change password
        </Button>
        {forced && <SignOutInstead />}
      </div>
    </form>
  );
}

/** Where a person wanted to go before the password came between: this page says it, or the server in the address. */
function useWanted(): string | null {
  const { state } = useLocation() as { state: { next?: unknown } | null };
  const [search] = useSearchParams();
  return typeof state?.next === "string" ? state.next : search.get("next");
}

function SignOutInstead(): ReactNode {
  const signOut = useSignOut();
  return (
    <>
      <Button busy={signOut.isPending} onClick={() => signOut.mutate()}>
        Sign out
      </Button>
      {signOut.error !== null && <Problem error={signOut.error} />}
    </>
  );
}

function fieldErrors(error: Error | null): { old: string; new: string; elsewhere: boolean } {
  const field = error instanceof ApiError ? error.field : "";
  const message = error?.message ?? "";
  return {
    old: field === "old" ? message : "",
    new: field === "new" ? message : "",
    elsewhere: field !== "old" && field !== "new",
  };
}

interface SecretProps extends Pick<ComponentProps<"input">, "autoComplete"> {
  label: string;
  value: string;
  onText: (text: string) => void;
  error: string;
}

function Secret({ label, value, onText, error, autoComplete }: SecretProps): ReactNode {
  const id = useId();
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      <input
        id={id}
        className="input"
        type="password"
        required
        autoComplete={autoComplete}
        value={value}
        aria-invalid={error !== "" || undefined}
        aria-describedby={error === "" ? undefined : `${id}-error`}
        onChange={(event) => onText(event.target.value)}
      />
      {error !== "" && (
        <span className="field-error" id={`${id}-error`} role="alert">
          {error}
        </span>
      )}
    </div>
  );
}
