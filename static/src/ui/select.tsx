// One of several values, from a list that opens. Arrow keys, Home, End and typing choose; Escape closes.
import { getNonce } from "get-nonce";
import { Select as Radix } from "radix-ui";
import { useId, type ReactNode } from "react";

export type Option = readonly [value: string, words: string];

interface SelectProps {
  label: string;
  /** Where the label stands; `hidden`: only assistive tech reads it. */
  labelled?: "above" | "before" | "hidden";
  value: string;
  options: readonly Option[];
  onChange: (value: string) => void;
  describedBy?: string;
}

/** Radix keeps "" for "nothing chosen". */
const EMPTY = "\u00a0";

export function Select({ label, labelled = "above", value, options, onChange, describedBy }: SelectProps): ReactNode {
  const id = useId();
  return (
    <div className={labelled === "above" ? "field" : "row"}>
      <label htmlFor={id} className={labelled === "hidden" ? "visually-hidden" : undefined}>
        {label}
      </label>
      <Radix.Root value={value || EMPTY} onValueChange={(chosen) => onChange(chosen === EMPTY ? "" : chosen)}>
        <Radix.Trigger id={id} className="input select" aria-describedby={describedBy}>
          <span className="name">
            <Radix.Value />
          </span>
          <Radix.Icon aria-hidden="true">▾</Radix.Icon>
        </Radix.Trigger>
        <Radix.Portal>
          <Radix.Content className="menu select-list" position="popper" sideOffset={4} collisionPadding={8}>
            <Radix.Viewport nonce={getNonce()}>
              {options.map(([option, words]) => (
                <Radix.Item key={option} value={option || EMPTY} className="menu-item">
                  <Radix.ItemText>{words}</Radix.ItemText>
                </Radix.Item>
              ))}
            </Radix.Viewport>
          </Radix.Content>
        </Radix.Portal>
      </Radix.Root>
    </div>
  );
}
