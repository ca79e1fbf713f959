// Copying: says whether it worked, because a page without a secure origin may not.
import { useState, type ReactNode } from "react";
import { Button } from "./button";

export function CopyButton({ text, label = "Copy", small = false }: { text: string; label?: string; small?: boolean }): ReactNode {
  const [said, setSaid] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setSaid("Copied");
    } catch {
      setSaid("Select the text and copy it manually");
    }
    setTimeout(() => setSaid(""), 2000);
  };
  return (
    <Button small={small} onClick={() => void copy()}>
      <span role="status">{said === "" ? label : said}</span>
    </Button>
  );
}

/** A command to paste, with its button. */
export function Command({ text }: { text: string }): ReactNode {
  return (
    <div className="command">
      <code tabIndex={0}>{text}</code>
      <CopyButton small text={text} />
    </div>
  );
}
