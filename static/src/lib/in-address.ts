// A page's state in its address, such as a filter or a search. Typed text counts at once: a box that
// waited for the router would lose letters. The address follows at once as well, in place, so that Back leaves the
// page: a later write would call off the way to a place that was chosen meanwhile. A visitor who comes by a link or by Back
// gets what that address says.
import { useEffect, useState, type Dispatch, type SetStateAction } from "react";
import { NavigationType, useLocation, useNavigate, useNavigationType } from "react-router";

/** State of the page at this address. `read` and `write` are each other's reverse and stay the same functions. */
export function useInAddress<T>(
  read: (query: URLSearchParams) => T,
  write: (value: T) => URLSearchParams,
): [T, Dispatch<SetStateAction<T>>] {
  const { search, key } = useLocation();
  const arrived = useNavigationType() !== NavigationType.Replace;
  const navigate = useNavigate();
  const [value, setValue] = useState(() => read(new URLSearchParams(search)));
  const [adopted, setAdopted] = useState(key);
  if (key !== adopted) {
    setAdopted(key);
    if (arrived) setValue(read(new URLSearchParams(search)));
  }
  useEffect(() => {
    const serialized = write(value).toString();
    if (serialized === new URLSearchParams(search).toString()) return;
    void navigate({ search: serialized }, { replace: true, preventScrollReset: true });
  }, [value, search, navigate, write]);
  return [value, setValue];
}
