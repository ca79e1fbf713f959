// The two views of capacity: the fleet as it is, and as it could be.
import type { ReactNode } from "react";
import { NavLink } from "react-router";

export function CapacityTabs(): ReactNode {
  return (
    <nav className="tabs" aria-label="Capacity">
      <NavLink end to="/app/capacity">
        Map
      </NavLink>
      <NavLink to="/app/capacity/what-if">
        What if
      </NavLink>
    </nav>
  );
}
