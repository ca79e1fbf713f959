// A unified diff; the signs in front of the lines say what the colours say.
import type { ReactNode } from "react";

const KINDS: Readonly<Record<string, string>> = { "+": "added", "-": "removed", "@": "place" };

/** The kind of a line; the two lines with file names are none. */
export function kindOf(line: string): string {
  return /^(\+\+\+|---)( |$)/.test(line) ? "" : (KINDS[line.slice(0, 1)] ?? "");
}

export function Diff({ text }: { text: string }): ReactNode {
  const lines = text.replace(/\n$/, "").split("\n");
  return (
    <pre className="model-diff" tabIndex={0} role="group" aria-label="Difference">
      {lines.map((line, index) => (
        <code key={index} data-kind={kindOf(line) || undefined}>
          {line}
          {"\n"}
        </code>
      ))}
    </pre>
  );
}
