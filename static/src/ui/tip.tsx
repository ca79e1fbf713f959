// A tooltip: on hover and on focus, never the only place of anything that must be known. Without a text there is
// none, and what it belongs to stays the same element when there is one again.
import { Tooltip } from "radix-ui";
import { useState, type ReactElement, type ReactNode } from "react";

export function Tip({ text, children }: { text: ReactNode; children: ReactElement }): ReactNode {
  const [open, setOpen] = useState(false);
  return (
    <Tooltip.Root open={open && text !== ""} onOpenChange={setOpen}>
      <Tooltip.Trigger asChild>{children}</Tooltip.Trigger>
      <Tooltip.Portal>
        <Tooltip.Content className="tooltip" sideOffset={6} collisionPadding={8}>
          {text}
        </Tooltip.Content>
      </Tooltip.Portal>
    </Tooltip.Root>
  );
}
