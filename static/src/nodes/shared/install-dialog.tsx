// The way to a backend for some nodes: the picker, with the nodes chosen. Its code comes when it is asked for.
import { Suspense, type ReactNode } from "react";
import type { InstallPickerProps } from "../../backends/picker";
import { lazyDialog } from "../../ui/lazy";

const InstallPicker = lazyDialog<InstallPickerProps>(async () => (await import("../../backends/picker")).InstallPicker);

export function InstallDialog(props: Pick<InstallPickerProps, "nodeIds" | "onClose">): ReactNode {
  return (
    <Suspense>
      <InstallPicker {...props} />
    </Suspense>
  );
}
