// On to where somebody wanted to go before signing in, or choosing a password, came between.
import { useCallback, useEffect, type ReactNode } from "react";
import { useNavigate } from "react-router";
import { Checking } from "./gate";
import { safeNext } from "./next";

/** How to leave: inside this page, or to another one of the server. */
export function useOnward(): (wanted: string | null) => void {
  const navigate = useNavigate();
  return useCallback(
    (wanted) => {
      const { path, load } = safeNext(wanted, window.location.origin);
      if (load) window.location.assign(path);
      else void navigate(path, { replace: true });
    },
    [navigate],
  );
}

/** Leaves at once. */
export function Onward({ wanted }: { wanted: string | null }): ReactNode {
  const onward = useOnward();
  useEffect(() => onward(wanted), [onward, wanted]);
  return <Checking />;
}
