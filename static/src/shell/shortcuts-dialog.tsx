// The keyboard map of this page, and whether single keys do anything.
import type { ReactNode } from "react";
import { Dialog } from "../ui/dialog";
import { setSingleKeys, useShortcuts, useSingleKeys, type Shortcut } from "../ui/shortcuts";
import { Checkbox } from "../ui/text-field";

export function ShortcutsDialog({ onClose }: { onClose: () => void }): ReactNode {
  const rows = byDescription(useShortcuts());
  const on = useSingleKeys();
  return (
    <Dialog open onClose={onClose} title="Keyboard shortcuts">
      <dl className="shortcuts">
        {[...rows].map(([description, keys]) => (
          <div key={description}>
            <dt>{description}</dt>
            <dd>
              {keys.map((key, index) => (
                <span key={key}>
                  {index > 0 && " or "}
                  <Keys keys={key} />
                </span>
              ))}
            </dd>
          </div>
        ))}
      </dl>
      <Checkbox label="Enable single-key shortcuts" on={on} onChange={setSingleKeys} />
    </Dialog>
  );
}

function byDescription(shortcuts: readonly Shortcut[]): Map<string, string[]> {
  const rows = new Map<string, string[]>();
  for (const { description, keys } of shortcuts) {
    const describedKeys = rows.get(description) ?? [];
    if (!describedKeys.includes(keys)) rows.set(description, [...describedKeys, keys]);
  }
  return rows;
}

function Keys({ keys }: { keys: string }): ReactNode {
  return keys.split(" ").map((key, index) => (
    <span key={key}>
      {index > 0 && " then "}
      <kbd>{key.replace("mod+", "Ctrl-").replace(/-(.)$/, (_, letter: string) => `-${letter.toUpperCase()}`)}</kbd>
    </span>
  ));
}
