// Copying: says whether it worked, because a page without a secure origin may not.
import { useState, type ReactNode } from "react";
import { announce } from "./announce";
import { Button } from "./button";

export function CopyButton({ text, label = "Copy", small = false }: { text: string; label?: string; small?: boolean }): ReactNode {
  const [status, setStatus] = useState("");
  const copy = async () => {
    const outcome = await written(text);
    setStatus(outcome);
    // Not by a region in the button, which would have no name then.
    announce(outcome);
    setTimeout(() => setStatus(""), 2000);
  };
  return (
    <Button small={small} onClick={() => void copy()}>
      {status === "" ? label : status}
    </Button>
  );
}

async function written(text: string): Promise<string> {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied";
  } catch {
    return "Select the text and copy it manually";
  }
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
