// Menus: arrow keys, Home, End, Enter and Escape as people expect; focus returns to the button. A row's menu has the
// dots as its button, another one brings its own.
import { DropdownMenu } from "radix-ui";
import type { ReactElement, ReactNode } from "react";
import { Button } from "./button";
import { Icon, type IconName } from "./icons";

export interface MenuItem {
  label: string;
  /** Preventing the event's default keeps the menu open. */
  onSelect: (event: Event) => void;
  danger?: boolean;
  /** Why it cannot be chosen now. */
  refusal?: string;
  icon?: IconName;
  /** For one of several of which one is chosen. */
  checked?: boolean;
}

interface MenuProps {
  /** The name of the menu and, unless it brings its own, of its button. */
  name: string;
  items: readonly MenuItem[];
  /** A button; the dots unless given. */
  trigger?: ReactElement;
  /** Said above the items. */
  heading?: ReactNode;
}

export function Menu({ name, items, trigger, heading }: MenuProps): ReactNode {
  return (
    // The page behind stays as it is for assistive tech: a menu is no dialog.
    <DropdownMenu.Root modal={false}>
      <DropdownMenu.Trigger asChild>
        {trigger ?? (
          <Button kind="ghost" small aria-label={name}>
            <Icon name="more" />
          </Button>
        )}
      </DropdownMenu.Trigger>
      <DropdownMenu.Portal>
        <DropdownMenu.Content className="menu" align="end" sideOffset={4} collisionPadding={8}>
          {heading !== undefined && <DropdownMenu.Label className="menu-heading">{heading}</DropdownMenu.Label>}
          {items.map((item) => (
            <Item key={item.label} {...item} />
          ))}
        </DropdownMenu.Content>
      </DropdownMenu.Portal>
    </DropdownMenu.Root>
  );
}

function Item({ label, onSelect, danger = false, refusal = "", icon, checked }: MenuItem): ReactNode {
  const shared = {
    className: `menu-item ${danger ? "danger" : ""}`,
    disabled: refusal !== "",
    title: refusal === "" ? undefined : refusal,
    onSelect,
  };
  const content = (
    <>
      {icon !== undefined && <Icon name={icon} />}
      <span className="grow">{label}</span>
      {checked === true && <Icon name="done" />}
    </>
  );
  if (checked === undefined) return <DropdownMenu.Item {...shared}>{content}</DropdownMenu.Item>;
  return (
    <DropdownMenu.CheckboxItem {...shared} checked={checked}>
      {content}
    </DropdownMenu.CheckboxItem>
  );
}
