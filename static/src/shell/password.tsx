// Changing one's password: by choice, or because it was generated and is good for nothing else until it is changed.
import { useId, useState, type ComponentProps, type ReactNode, type SubmitEvent } from "react";
import { useLocation, useSearchParams } from "react-router";
import { Button } from "../ui/button";
import { Problem } from "../ui/problem";
import { PageHead } from "../ui/title";
import { useOnward } from "./redirect";
import { problems, refused, SHORTEST, type Entry, type Problems } from "./password-rules";
import { useChangePassword, useSession, useSignOut } from "./session";

const EMPTY: Entry = { old: "", next: "", repeat: "" };

export function PasswordPage(): ReactNode {
  const { data: user } = useSession();
  const [forced] = useState(user?.mustChangePassword === true);
  if (user === undefined || user === null) return null;
  return (
    <>
      <PageHead title="Change password" />
      {forced && <p>Your password was generated. Choose a new password to continue.</p>}
      <PasswordForm name={user.name} forced={forced} />
    </>
  );
}

function PasswordForm({ name, forced }: { name: string; forced: boolean }): ReactNode {
  const [entry, setEntry] = useState<Entry>(EMPTY);
  const [entryProblems, setEntryProblems] = useState<Problems>({});
  const change = useChangePassword();
  const onward = useOnward();
  const returnAddress = useReturnAddress();
  const rules = useId();
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (change.busy) return;
    const entryErrors = problems(entry);
    setEntryProblems(entryErrors);
    change.forget();
    if (Object.keys(entryErrors).length > 0) return;
    const done = () => {
      setEntry(EMPTY);
      // At once: the gate shows another page as soon as it knows.
      if (forced) onward(returnAddress);
    };
    change.run({ old: entry.old, new: entry.next }, done, (error) => setEntryProblems(refused(error)));
  };
  const secret = (field: keyof Entry) => ({
    value: entry[field],
    problems: entryProblems[field] ?? [],
    onText: (text: string) => {
      setEntry({ ...entry, [field]: text });
      setEntryProblems({ ...entryProblems, [field]: [] });
    },
  });
  return (
    <form className="stack narrow" noValidate onSubmit={submit}>
      {/* Tells a password manager whose password it is. */}
      <input hidden readOnly name="username" autoComplete="username" value={name} />
      <Secret label="Current password" autoComplete="current-password" {...secret("old")} />
      <Secret label="New password" autoComplete="new-password" {...secret("next")} describedBy={rules}>
        <Rules id={rules} />
      </Secret>
      <Secret label="Confirm new password" autoComplete="new-password" {...secret("repeat")} />
      {change.error !== null && Object.keys(refused(change.error)).length === 0 && <Problem error={change.error} />}
      <p role="status">{change.succeeded ? "Password changed. You are signed out everywhere else." : ""}</p>
      <div className="row wrap">
        <Button type="submit" kind="primary" busy={change.busy}>
          Change password
        </Button>
        {forced && <SignOutInstead />}
      </div>
    </form>
  );
}

/** The rules as the server has them; it also knows the common passwords and decides in the end. */
function Rules({ id }: { id: string }): ReactNode {
  return (
    <ul id={id} className="muted password-rules">
      <li>At least {SHORTEST} characters, not only digits</li>
      <li>Not a commonly used password</li>
      <li>Different from the current password</li>
    </ul>
  );
}

/** Where a person wanted to go before the password came between: this page says it, or the server in the address. */
function useReturnAddress(): string | null {
  const { state } = useLocation() as { state: { next?: unknown } | null };
  const [search] = useSearchParams();
  return typeof state?.next === "string" ? state.next : search.get("next");
}

function SignOutInstead(): ReactNode {
  const signOut = useSignOut();
  return (
    <>
      <Button busy={signOut.busy} onClick={() => signOut.run()}>
        Sign out
      </Button>
      <Problem error={signOut.error} />
    </>
  );
}

interface SecretProps extends Pick<ComponentProps<"input">, "autoComplete"> {
  label: string;
  value: string;
  onText: (text: string) => void;
  problems: readonly string[];
  /** The id of what explains the field, shown below it. */
  describedBy?: string;
  children?: ReactNode;
}

function Secret({ label, value, onText, problems, describedBy = "", children, autoComplete }: SecretProps): ReactNode {
  const id = useId();
  const isInvalid = problems.length > 0;
  const description = [isInvalid ? `${id}-error` : "", describedBy].filter(Boolean).join(" ");
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
        aria-invalid={isInvalid || undefined}
        aria-describedby={description || undefined}
        onChange={(event) => onText(event.target.value)}
      />
      {isInvalid && (
        <div className="field-error" id={`${id}-error`} role="alert">
          {problems.map((problem) => (
            <div key={problem}>{problem}</div>
          ))}
        </div>
      )}
      {children}
    </div>
  );
}
