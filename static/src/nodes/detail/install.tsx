// The way to a backend for this node.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { Dialog } from "../../ui/dialog";

interface InstallDialogProps {
  id: string;
  onClose: () => void;
}

export function InstallDialog({ id, onClose }: InstallDialogProps): ReactNode {
  return (
    <Dialog open onClose={onClose} title="Install a backend">
      <p>
        <Link to={`/app/backends?target=${id}`}>Choose one in the catalogue</Link>
      </p>
    </Dialog>
  );
}
