// The menu of a row: arrow keys, Home, End, Enter and Escape as people expect; focus returns to its button.
import { DropdownMenu } from "radix-ui";
import type { ReactNode } from "react";
import { Button } from "./button";

export interface MenuItem {
  label: string;
  onSelect: () => void;
  danger?: boolean;
  /** Why it cannot be chosen now. */
  refusal?: string;
}

export function Menu({ name, items }: { name: string; items: readonly MenuItem[] }): ReactNode {
  return (
    <DropdownMenu.Root>
      <DropdownMenu.Trigger asChild>
        <Button kind="ghost" small aria-label={name}>
          ⋯
        </Button>
      </DropdownMenu.Trigger>
      <DropdownMenu.Portal>
        <DropdownMenu.Content className="menu" align="end" sideOffset={4} collisionPadding={8}>
          {items.map((item) => (
            <DropdownMenu.Item
              key={item.label}
              className={`menu-item ${item.danger === true ? "danger" : ""}`}
              disabled={item.refusal !== undefined && item.refusal !== ""}
              title={item.refusal}
              onSelect={item.onSelect}
            >
              {item.label}
            </DropdownMenu.Item>
          ))}
        </DropdownMenu.Content>
      </DropdownMenu.Portal>
    </DropdownMenu.Root>
  );
}
