// A tooltip: on hover and on focus, never the only place of anything that must be known.
import { Tooltip } from "radix-ui";
import type { ReactElement, ReactNode } from "react";

export function Tip({ text, children }: { text: ReactNode; children: ReactElement }): ReactNode {
  return (
    <Tooltip.Root>
      <Tooltip.Trigger asChild>{children}</Tooltip.Trigger>
      <Tooltip.Portal>
        <Tooltip.Content className="tooltip" sideOffset={6} collisionPadding={8}>
          {text}
        </Tooltip.Content>
      </Tooltip.Portal>
    </Tooltip.Root>
  );
}
