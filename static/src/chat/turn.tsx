// One question and its answer, with the figures of the answer beneath it.
import { memo, type ReactNode } from "react";
import { Link } from "react-router";
import { useLive } from "../live/hooks";
import { useSession } from "../shell/session";
import { Button } from "../ui/button";
import { CopyButton } from "../ui/copy";
import { Problem } from "../ui/problem";
import { figuresOf, isOpen, type Answer, type ToolCall, type Turn } from "./answer";
import { textOf } from "./blocks";
import { Waiting } from "./load-progress";
import { Code, Rendered } from "./markdown";

interface LastProps {
  onAgain: () => void;
  onEdit: () => void;
}

interface TurnProps extends LastProps {
  turn: Turn;
  /** Only the last one can be regenerated. */
  last: boolean;
}

export const TurnView = memo(function TurnView({ turn, last, onAgain, onEdit }: TurnProps): ReactNode {
  const { question, answer } = turn;
  return (
    <>
      <article className="chat-question" aria-label="You">
        <p className="chat-who">You</p>
        <p className="chat-said" dir="auto">
          {question}
        </p>
        {last && !isOpen(answer) && (
          <Button small kind="ghost" onClick={onEdit}>
            Edit
          </Button>
        )}
      </article>
      <article className="chat-answer" aria-label={answer.model} aria-busy={isOpen(answer) || undefined}>
        <p className="chat-who">
          <bdi>{answer.model}</bdi>
        </p>
        <AnswerMessage answer={answer} />
        <Problem error={answer.error} {...(last ? { onRetry: onAgain } : {})} />
        {!isOpen(answer) && <Foot answer={answer} {...(last ? { onAgain } : {})} />}
      </article>
    </>
  );
});

function AnswerMessage({ answer }: { answer: Answer }): ReactNode {
  const thought = textOf(answer.reasoning) !== "";
  const text = textOf(answer.blocks) !== "";
  const nothing = !thought && !text && answer.tools.length === 0;
  if (nothing && isOpen(answer)) return <Waiting answer={answer} />;
  return (
    <>
      {thought && (
        <details className="chat-reasoning">
          <summary>{isOpen(answer) && !text ? "Reasoning…" : "Reasoning"}</summary>
          <Rendered blocks={answer.reasoning} />
        </details>
      )}
      {text && <Rendered blocks={answer.blocks} />}
      {answer.tools.map((call, at) => (
        <Call key={at} call={call} />
      ))}
      {nothing && answer.state === "done" && <p className="muted">Empty answer.</p>}
      {nothing && answer.state !== "done" && <p className="muted">No answer. Later requests omit this question.</p>}
    </>
  );
}

function Call({ call }: { call: ToolCall }): ReactNode {
  return (
    <div>
      <p className="muted">
        Calls <code>{call.name}</code>
      </p>
      <Code text={indented(call.arguments)} />
    </div>
  );
}

/** JSON in lines, anything else as it is. */
function indented(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function Foot({ answer, onAgain }: { answer: Answer; onAgain?: () => void }): ReactNode {
  const text = textOf(answer.blocks);
  const isAdmin = useSession().data?.role === "admin";
  return (
    <div className="chat-foot">
      <ul className="chat-figures" aria-label="Figures of this answer">
        {isAdmin && answer.node !== "" && (
          <li>
            on <NodeLink id={answer.node} />
          </li>
        )}
        {figuresOf(answer).map((figure) => (
          <li key={figure}>{figure}</li>
        ))}
      </ul>
      <div className="row wrap">
        {text !== "" && <CopyButton small text={text} label="Copy answer" />}
        {onAgain !== undefined && answer.error === null && (
          <Button small onClick={onAgain}>
            Regenerate
          </Button>
        )}
      </div>
    </div>
  );
}

/** By its name, while it is there. */
function NodeLink({ id }: { id: string }): ReactNode {
  const name = useLive((state) => state.nodes.get(id)?.name);
  return (
    <Link to={`/app/nodes/${id}`}>
      <bdi>{name ?? id}</bdi>
    </Link>
  );
}
