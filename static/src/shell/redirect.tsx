// On to where somebody wanted to go before signing in, or choosing a password, came between.
import { useCallback, useEffect, type ReactNode } from "react";
import { useNavigate } from "react-router";
import { Checking } from "./gate";
import { safeNext } from "./next-address";

/** Returns a function that navigates within this app, or to another page of the server. */
export function useOnward(): (address: string | null) => void {
  const navigate = useNavigate();
  return useCallback(
    (address) => {
      const { path, load } = safeNext(address, window.location.origin);
      if (load) window.location.assign(path);
      else void navigate(path, { replace: true });
    },
    [navigate],
  );
}

/** Leaves at once. */
export function Onward({ address }: { address: string | null }): ReactNode {
  const onward = useOnward();
  useEffect(() => onward(address), [onward, address]);
  return <Checking />;
}
