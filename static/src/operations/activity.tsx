// The Activity page: what runs, what failed and waits for somebody, what has ended since the page was opened. An
// address that ends in #job-… leads to that operation.
import { memo, useCallback, useDeferredValue, useEffect, useMemo, useState, type ReactNode } from "react";
import { Link, useLocation } from "react-router";
import { useInAddress } from "../lib/in-address";
import { useLive } from "../live/hooks";
import type { Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { Button } from "../ui/button";
import { Empty, Loading } from "../ui/empty";
import "./activity.css";
import { CancelButton } from "./cancel";
import { FailureCard, ProgressCard } from "./card";
import { failureGroups, type FailureGroup } from "./causes";
import { EndedLine } from "./ended-line";
import { addressOf, choiceIn, endedOf, EVERYTHING, finds, shows, SHOWS, type Choice } from "./filter";
import { ActivityHead } from "./tabs";
import { useWork, type Work } from "./watch";

const DRAWN = 50;
/** At first, and with each frame: opening the page is begun again by every change meanwhile, so it must be short. */
const AT_A_TIME = 10;

export function ActivityPage(): ReactNode {
  // Two hundred moving cards are drawn in the pauses: typing and pressing come first.
  const work = useDeferredValue(useWork());
  const [choice, choose] = useInAddress(choiceIn, addressOf);
  const showAll = useCallback(() => choose(EVERYTHING), [choose]);
  const linkedJob = useLinkedJob(work);
  // Typing has priority over its results.
  const shown = useDeferredValue(choice);
  return (
    <div className="activity">
      <ActivityHead part="" title="Activity" note={work.isKnownTotal && <Tally work={work} />} />
      <div className="row wrap" role="group" aria-label="Show">
        {SHOWS.map(({ show, label }) => (
          <Button key={show} small className="chip" aria-pressed={choice.show === show} onClick={() => choose((previous) => ({ ...previous, show }))}>
            {label}
          </Button>
        ))}
        <input
          type="search"
          className="input activity-search"
          aria-label="Find operations"
          placeholder="Name, node, user, error or ID"
          value={choice.q}
          onChange={(event) => choose((previous) => ({ ...previous, q: event.target.value }))}
        />
      </div>
      <Sections work={work} choice={shown} linkedJob={linkedJob} onAll={showAll} />
    </div>
  );
}

/** Over everything, filtered or not; a clause with zero is dropped. */
function Tally({ work }: { work: Work }): ReactNode {
  const operationList = [...work.operations.values()];
  const [active, failed] = [operationList.filter(isActive).length, operationList.filter(needsAttention).length];
  const parts = [];
  if (active > 0) parts.push(`${active} in progress`);
  if (failed > 0) parts.push(`${failed} ${failed === 1 ? "needs" : "need"} attention`);
  return parts.length === 0 ? "No operations running" : parts.join(" · ");
}

/** The job that the address names; leads there once, when it is on the page. */
function useLinkedJob(work: Work): string {
  const { hash, key } = useLocation();
  const linkedJob = hash.startsWith("#job-") ? hash.slice("#job-".length) : "";
  const isLinkedJobKnown = linkedJob !== "" && work.operations.has(linkedJob);
  useEffect(() => {
    const line = isLinkedJobKnown ? document.getElementById(`job-${linkedJob}`) : null;
    line?.scrollIntoView({ block: "center" });
    line?.focus({ preventScroll: true });
  }, [isLinkedJobKnown, linkedJob, key]);
  return linkedJob;
}

interface SectionsProps {
  work: Work;
  choice: Choice;
  linkedJob: string;
  onAll: () => void;
}

const Sections = memo(function Sections({ work, choice, linkedJob, onAll }: SectionsProps): ReactNode {
  const connection = useLive((state) => state.connection);
  const shown = useMemo(() => [...work.operations.values()].filter((operation) => shows(choice.show, operation) && finds(choice.q, operation)), [work.operations, choice]);
  const active = useMemo(() => shown.filter(isActive).sort(newestFirst), [shown]);
  const failed = useMemo(() => failureGroups(shown.filter(needsAttention)), [shown]);
  const ended = useMemo(() => endedOf(shown), [shown]);
  if (!work.isKnownTotal) return <NotYet waiting={connection === "connecting" || connection === "live"} />;
  if (active.length + failed.length + ended.length === 0) return <Nothing choice={choice} onAll={onAll} />;
  const sought = (operations: readonly Operation[]) => operations.findIndex((operation) => operation.jobID === linkedJob);
  const holds = (group: FailureGroup) => sought(group.operations) >= 0;
  return (
    <>
      <Section title="Needs attention" number={failed.reduce((total, group) => total + group.operations.length, 0)} items={failed} sought={failed.findIndex(holds)}>
        {(group) => <FailureCard key={group.id} group={group} linkedJob={holds(group) ? linkedJob : ""} />}
      </Section>
      <Section title="In progress" number={active.length} items={active} sought={sought(active)} action={active.length > 1 && <CancelButton operations={active} />}>
        {(operation) => <ProgressCard key={operation.jobID} operation={operation} linkedJob={operation.jobID === linkedJob ? linkedJob : ""} pace={work.paces.get(operation.jobID)} />}
      </Section>
      <Section title="Recently finished" number={ended.length} items={ended} sought={sought(ended)} list>
        {(operation) => <EndedLine key={operation.jobID} operation={operation} />}
      </Section>
    </>
  );
});

/** By what does not change: a card does not swap places with another while it is read. */
function newestFirst(left: Operation, right: Operation): number {
  return Date.parse(right.createdAt) - Date.parse(left.createdAt) || left.jobID.localeCompare(right.jobID);
}

interface SectionProps<Item> {
  title: string;
  number: number;
  items: readonly Item[];
  /** The place of what the address names: it is drawn in any case. */
  sought?: number;
  list?: boolean;
  /** The action on all of them. */
  action?: ReactNode;
  children: (item: Item) => ReactNode;
}

function Section<Item>({ title, number, items, sought: place = -1, list = false, action, children }: SectionProps<Item>): ReactNode {
  const [limit, setLimit] = useState(AT_A_TIME);
  const drawn = Math.max(limit, place + 1);
  useEffect(() => {
    if (limit >= DRAWN) return undefined;
    const frame = requestAnimationFrame(() => setLimit(limit + AT_A_TIME));
    return () => cancelAnimationFrame(frame);
  }, [limit]);
  if (items.length === 0) return null;
  const shown = items.slice(0, drawn).map(children);
  return (
    <section className="stack" aria-label={title}>
      <div className="row">
        <h2>
          {title} <span className="muted">{number}</span>
        </h2>
        {action}
      </div>
      {list ? <ul className="ended">{shown}</ul> : shown}
      {limit >= DRAWN && items.length > drawn && (
        <div>
          <Button onClick={() => setLimit(drawn + DRAWN)}>Show more ({items.length - drawn})</Button>
        </div>
      )}
    </section>
  );
}

function NotYet({ waiting }: { waiting: boolean }): ReactNode {
  if (waiting) return <Loading subject="operations" />;
  return (
    <Empty title="Not connected">
      <p>The live feed is disconnected. Operations keep running and appear here when it is back.</p>
    </Empty>
  );
}

function Nothing({ choice: { show, q }, onAll }: { choice: Choice; onAll: () => void }): ReactNode {
  if (show === "all" && q === "") {
    return (
      <Empty title="No operations running">
        <p>Running installs, loads and removals appear here. Failures stay until dismissed.</p>
        <Link className="button" to="/app/backends">
          Install a backend
        </Link>
      </Empty>
    );
  }
  const label = SHOWS.find((choice) => choice.show === show)?.label.toLowerCase() ?? show;
  return (
    <Empty title={q === "" ? `No “${label}” operations` : "No matching operations"}>
      <Button onClick={onAll}>Show all</Button>
    </Empty>
  );
}
