// A place for the search.
import type { ReactNode } from "react";

export function Palette({ onClose }: { onClose: () => void; onShortcuts: () => void; onSignOut: () => void }): ReactNode {
  return <button onClick={onClose}>Close</button>;
}
