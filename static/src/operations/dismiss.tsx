// Dismissing failures with a comment: why no more is to be done about them. The comment stays in the record.
import { useId, useState, type ReactNode, type SubmitEvent } from "react";
import { useAction } from "../api/action";
import { count } from "../lib/format";
import type { Operation } from "../live/messages";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Dialog } from "../ui/dialog";
import { Problem } from "../ui/problem";
import { act } from "./calls";

const LONGEST = 500;

interface DismissProps {
  operations: readonly Operation[];
  onClose: () => void;
}

export function DismissDialog({ operations, onClose }: DismissProps): ReactNode {
  const [comment, setComment] = useState("");
  const id = useId();
  const dismissal = useAction(
    () => act("dismiss", operations, comment.trim()),
    () => {
      announce(`${count(operations.length, "failure")} dismissed`);
      onClose();
    },
  );
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (!dismissal.busy) dismissal.run();
  };
  return (
    <Dialog open onClose={onClose} title={`Dismiss ${count(operations.length, "failure")}`} description="For all users. The record stays in History with your comment.">
      <form className="stack" onSubmit={submit}>
        <label className="field" htmlFor={id}>
          <span>Comment (optional)</span>
          <textarea data-first id={id} className="input" rows={3} maxLength={LONGEST} value={comment} onChange={(event) => setComment(event.target.value)} />
        </label>
        <Problem error={dismissal.error} />
        <div className="row wrap">
          <Button type="submit" kind="primary" busy={dismissal.busy}>
            Dismiss
          </Button>
          <Button onClick={onClose}>Cancel</Button>
        </div>
      </form>
    </Dialog>
  );
}
