// The filter of the page and its address, which follows at once and in place, so that Back leaves the page. At once,
// because a write that came later would call off the way to a node that was chosen meanwhile. Whoever comes by a
// link or by Back gets what that address says.
import { useEffect, useState } from "react";
import { NavigationType, useLocation, useNavigate, useNavigationType } from "react-router";
import { readFilter, writeFilter, type Filter } from "./filter";

export type SetFilter = (change: (before: Filter) => Filter) => void;

export function useFilter(): [Filter, SetFilter] {
  const { search, key } = useLocation();
  const arrived = useNavigationType() !== NavigationType.Replace;
  const navigate = useNavigate();
  const [filter, setFilter] = useState(() => readFilter(new URLSearchParams(search)));
  const [adopted, setAdopted] = useState(key);
  if (key !== adopted) {
    setAdopted(key);
    if (arrived) setFilter(readFilter(new URLSearchParams(search)));
  }
  useEffect(() => {
    const wanted = writeFilter(filter).toString();
    if (wanted === new URLSearchParams(search).toString()) return;
    void navigate({ search: wanted }, { replace: true, preventScrollReset: true });
  }, [filter, search, navigate]);
  return [filter, setFilter];
}
