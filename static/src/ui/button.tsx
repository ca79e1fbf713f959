// Buttons. One that cannot be pressed stays in the order of Tab and says why.
import type { ComponentProps, MouseEvent, ReactNode } from "react";
import { Tip } from "./tip";

export interface ButtonProps extends Omit<ComponentProps<"button">, "disabled"> {
  kind?: "plain" | "primary" | "danger" | "ghost";
  small?: boolean;
  /** The work it started is under way; pressing again does nothing. */
  busy?: boolean;
  /** Why it cannot be pressed now; "" if it can. Absent: it always can. */
  refusal?: string | undefined;
}

export function Button({ kind = "plain", small = false, busy = false, refusal, ...rest }: ButtonProps): ReactNode {
  const { className = "", onClick, children, ...attributes } = rest;
  const off = busy || (refusal !== undefined && refusal !== "");
  const press = (event: MouseEvent<HTMLButtonElement>) => {
    if (off) event.preventDefault();
    else onClick?.(event);
  };
  const button = (
    <button
      type="button"
      {...attributes}
      className={`button ${kind} ${small ? "small" : ""} ${className}`}
      aria-disabled={off || undefined}
      aria-busy={busy || undefined}
      onClick={press}
    >
      {busy && <span className="spinner" aria-hidden="true" />}
      {children}
    </button>
  );
  // Not by whether it is refused now: the focus would be lost when that changes.
  return refusal === undefined ? button : <Tip text={refusal}>{button}</Tip>;
}

/** A button that shows a glyph and has a name. */
export function IconButton({ name, glyph, ...rest }: ButtonProps & { name: string; glyph: ReactNode }): ReactNode {
  return (
    <Tip text={name}>
      <Button kind="ghost" aria-label={name} {...rest} className={`icon ${rest.className ?? ""}`}>
        <span aria-hidden="true">{glyph}</span>
      </Button>
    </Tip>
  );
}
