// The way to a backend for this node: the picker, with the node chosen. Its code comes when it is asked for.
import { Suspense, useMemo, type ReactNode } from "react";
import type { InstallPickerProps } from "../../backends/picker";
import { lazyDialog } from "../../ui/lazy";

const InstallPicker = lazyDialog<InstallPickerProps>(async () => (await import("../../backends/picker")).InstallPicker);

interface InstallDialogProps {
  id: string;
  onClose: () => void;
}

export function InstallDialog({ id, onClose }: InstallDialogProps): ReactNode {
  const nodeIds = useMemo(() => [id], [id]);
  return (
    <Suspense>
      <InstallPicker nodeIds={nodeIds} onClose={onClose} />
    </Suspense>
  );
}
