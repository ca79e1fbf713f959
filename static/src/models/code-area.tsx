// A text with line numbers, to be edited or only read. Lines with an error are marked, and listed below with the way to them.
import { useId, useRef, type ReactNode } from "react";
import { offsetOf } from "./editor-form";
import type { TextError } from "./shapes";

interface CodeAreaProps {
  label: string;
  text: string;
  errors?: readonly TextError[];
  /** Absent: the text is only read. */
  onChange?: (text: string) => void;
}

const LEAST_LINES = 8;

export function CodeArea({ label, text, errors = [], onChange }: CodeAreaProps): ReactNode {
  const area = useRef<HTMLTextAreaElement>(null);
  const id = useId();
  const lines = text.split("\n").length;
  const marked = new Set(errors.map(({ line }) => line));
  const go = ({ line, column }: TextError) => {
    const at = offsetOf(text, line, column);
    area.current?.focus();
    area.current?.setSelectionRange(at, at);
  };
  return (
    <div className="stack">
      <div className="code-area">
        <div className="code-lines" aria-hidden="true">
          {Array.from({ length: Math.max(lines, LEAST_LINES) }, (_, index) => (
            <span key={index} data-bad={marked.has(index + 1) || undefined}>
              {index + 1}
            </span>
          ))}
        </div>
        <textarea
          ref={area}
          className="code-text"
          aria-label={label}
          aria-invalid={errors.length > 0 || undefined}
          aria-describedby={id}
          rows={Math.max(lines, LEAST_LINES)}
          wrap="off"
          spellCheck={false}
          autoCapitalize="none"
          autoComplete="off"
          value={text}
          readOnly={onChange === undefined}
          onChange={(event) => onChange?.(event.target.value)}
        />
      </div>
      <div id={id} role="status">
        <Errors errors={errors} onGo={go} />
      </div>
    </div>
  );
}

function Errors({ errors, onGo }: { errors: readonly TextError[]; onGo: (error: TextError) => void }): ReactNode {
  return (
    <ul className="code-errors">
      {errors.map((error, index) => (
        <li key={index}>
          {error.line > 0 ? (
            <button type="button" className="link" onClick={() => onGo(error)}>
              Line {error.line}
              {error.column > 0 && `, column ${error.column}`}
            </button>
          ) : (
            <code>{error.path}</code>
          )}{" "}
          <bdi>{error.message}</bdi>
        </li>
      ))}
    </ul>
  );
}
