// The box for a question. Enter sends, Shift and Enter begin a new line, Escape stops the answer or leaves an edit.
import { useId, type KeyboardEvent, type ReactNode, type RefObject, type SubmitEvent } from "react";
import { Button } from "../ui/button";
import type { Chat, Conversation } from "./conversation";

interface ComposerProps {
  conversation: Conversation;
  chat: Chat;
  busy: boolean;
  /** Why nothing can be sent; "" if it can. */
  refusal: string;
  field: RefObject<HTMLTextAreaElement | null>;
  onSend: () => void;
  onStop: () => void;
}

export function Composer({ conversation, chat, busy, refusal, field, onSend, onStop }: ComposerProps): ReactNode {
  const id = useId();
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    onSend();
  };
  return (
    <form className="chat-composer" onSubmit={submit} aria-label={chat.editing ? "Edit the last question" : "New question"}>
      {chat.editing && (
        <div className="row spread">
          <span className="muted">Replaces the last question and its answer.</span>
          <Button small onClick={() => conversation.leaveEdit()}>
            Cancel edit
          </Button>
        </div>
      )}
      <div className="chat-line">
        <Question conversation={conversation} chat={chat} busy={busy} field={field} keysId={`${id}-keys`} onSend={onSend} />
        {busy ? (
          <Button kind="danger" onClick={onStop}>
            Stop
          </Button>
        ) : (
          <Button type="submit" kind="primary" refusal={refusal}>
            Send
          </Button>
        )}
      </div>
      <p className="field-hint" id={`${id}-keys`}>
        Enter to send, Shift+Enter for a new line, Esc to stop
      </p>
    </form>
  );
}

type QuestionProps = Omit<ComposerProps, "refusal" | "onStop"> & { /** The text that describes the keys. */ keysId: string };

function Question({ conversation, chat, busy, field, keysId, onSend }: QuestionProps): ReactNode {
  const press = (event: KeyboardEvent<HTMLTextAreaElement>) => {
    if (event.nativeEvent.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!busy) onSend();
    } else if (event.key === "Escape" && (busy || chat.editing)) {
      event.preventDefault();
      if (busy) conversation.stop();
      else conversation.leaveEdit();
    }
  };
  return (
    <textarea
      ref={field}
      className="input"
      rows={1}
      dir="auto"
      aria-label="Message"
      placeholder="Message"
      aria-describedby={keysId}
      value={chat.draft}
      onChange={(event) => conversation.set({ draft: event.target.value })}
      onKeyDown={press}
    />
  );
}
