// Dialogs. A plain one takes Escape and a press outside; one that asks before something is lost puts the focus on
// the safe answer, and a dangerous one wants a word typed. Focus returns to where it came from.
import { AlertDialog, Dialog as Radix } from "radix-ui";
import { useId, useRef, useState, type ReactNode, type RefObject, type SubmitEvent } from "react";
import { Button } from "./button";
import { Icon } from "./icons";
import { Problem } from "./problem";
import { useReturnFocus } from "./return-focus";

interface DialogProps {
  open: boolean;
  onClose: () => void;
  title: ReactNode;
  description?: ReactNode;
  wide?: boolean;
  /** The element that gets the focus first, such as the safe answer; else the one marked `data-first`, else the first control. */
  first?: RefObject<HTMLElement | null>;
  children: ReactNode;
}

export function Dialog({ open, onClose, title, description, wide = false, first, children }: DialogProps): ReactNode {
  const focus = useReturnFocus();
  const enter = (event: Event) => {
    const target = first?.current ?? marked(event.currentTarget);
    if (target === null) return;
    event.preventDefault();
    target.focus();
  };
  return (
    <Radix.Root open={open} onOpenChange={(isOpen) => !isOpen && onClose()}>
      <Radix.Portal>
        <Radix.Overlay className="overlay" />
        <Radix.Content
          className={`dialog ${wide ? "wide" : ""}`}
          {...focus}
          onOpenAutoFocus={enter}
          {...(description !== undefined ? {} : { "aria-describedby": undefined })}
        >
          <div className="row spread">
            <Radix.Title>{title}</Radix.Title>
            <Radix.Close asChild>
              <Button kind="ghost" small aria-label="Close">
                <Icon name="close" />
              </Button>
            </Radix.Close>
          </div>
          {description !== undefined && <Radix.Description asChild><div className="muted">{description}</div></Radix.Description>}
          {children}
        </Radix.Content>
      </Radix.Portal>
    </Radix.Root>
  );
}

/** `autoFocus` is not enough above another dialog, which calls the focus back before this one holds it. */
function marked(content: EventTarget | null): HTMLElement | null {
  return content instanceof HTMLElement ? content.querySelector("[data-first]") : null;
}

interface ConfirmProps {
  open: boolean;
  onClose: () => void;
  title: ReactNode;
  /** The consequence, naming what it affects. */
  children: ReactNode;
  /** The label of the button that does it. */
  action: string;
  danger?: boolean;
  /** A word that has to be typed first. */
  typed?: string;
  /** The label of the safe answer, where "Cancel" could be taken for the action. */
  back?: string;
  busy?: boolean;
  error?: Error | null;
  onConfirm: () => void;
}

/** Asks before something happens; stays open while it runs and shows why it failed. */
export function Confirm(props: ConfirmProps): ReactNode {
  const first = useRef<HTMLElement>(null);
  const focus = useReturnFocus();
  const { open, onClose, title, danger = false, error = null } = props;
  return (
    <AlertDialog.Root open={open} onOpenChange={(isOpen) => !isOpen && onClose()}>
      <AlertDialog.Portal>
        <AlertDialog.Overlay className="overlay" onClick={onClose} />
        <AlertDialog.Content
          className="dialog"
          {...focus}
          onOpenAutoFocus={(event) => {
                    // Radix would focus its own Cancel, which is not used here.
            event.preventDefault();
            first.current?.focus();
          }}
        >
          <AlertDialog.Title>
            {danger && <span aria-hidden="true">⚠ </span>}
            {title}
          </AlertDialog.Title>
          <AlertDialog.Description asChild>
            <div className="stack">{props.children}</div>
          </AlertDialog.Description>
          <Problem error={error} />
          <Answer {...props} first={first} />
        </AlertDialog.Content>
      </AlertDialog.Portal>
    </AlertDialog.Root>
  );
}

/** The buttons, and the word to type. `first` is where the focus starts: the field, else the safe answer. */
function Answer(props: ConfirmProps & { first: RefObject<HTMLElement | null> }): ReactNode {
  const { typed, danger = false, busy = false, action, back = "Cancel", onConfirm, onClose, first } = props;
  const start = typed !== undefined ? "field" : danger ? "cancel" : "action";
  const hold = (part: typeof start) => (element: HTMLElement | null) => {
    if (part === start) first.current = element;
  };
  const [text, setText] = useState("");
  const id = useId();
  const refusal = typed !== undefined && text !== typed ? `Type ${typed} to confirm` : "";
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (refusal === "" && !busy) onConfirm();
  };
  return (
    <form className="stack" onSubmit={submit}>
      {typed !== undefined && (
        <label className="field" htmlFor={id}>
          <span>
            Type <code className="name">{typed}</code> to confirm
          </span>
          <input ref={hold("field")} id={id} className="input" value={text} autoComplete="off" onChange={(event) => setText(event.target.value)} />
        </label>
      )}
      <div className="row wrap">
        <Button ref={hold("action")} type="submit" kind={danger ? "danger" : "primary"} busy={busy} refusal={refusal}>
          {action}
        </Button>
        <Button ref={hold("cancel")} onClick={onClose}>
          {back}
        </Button>
      </div>
    </form>
  );
}
