// The filter of the page and its address. What is typed counts at once; the address follows a moment later, in
// place, so that Back leaves the page. Whoever comes by a link or by Back gets what that address says.
import { useEffect, useState } from "react";
import { NavigationType, useLocation, useNavigate, useNavigationType } from "react-router";
import { readFilter, writeFilter, type Filter } from "./filter";

const WRITE_AFTER_MS = 200;

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
    const write = () => void navigate({ search: wanted }, { replace: true, preventScrollReset: true });
    const timer = setTimeout(write, WRITE_AFTER_MS);
    return () => clearTimeout(timer);
  }, [filter, search, navigate]);
  return [filter, setFilter];
}
