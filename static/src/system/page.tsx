// System health: every part of the server with its state, since when, and what to do; the schedules and the processes.
// The answer is asked for again with each sign of life of the feed, so the page moves while it is open.
import { keepPreviousData, useQuery, useQueryClient } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { Link } from "react-router";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { useChange, useLive } from "../live/hooks";
import { Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { Ago } from "../ui/time";
import { PageHead } from "../ui/title";
import "./system.css";

type Health = components["schemas"]["SystemHealth"];
type Part = Health["parts"][number];

const KEY = ["system", "health"] as const;
const STATE_WORDS: Readonly<Record<Part["state"], { tone: string; word: string }>> = {
  ok: { tone: "good", word: "OK" },
  warning: { tone: "warn", word: "attention" },
  error: { tone: "bad", word: "problem" },
};
const OVERALL_TEXTS: Readonly<Record<Part["state"], string>> = {
  ok: "All systems operational",
  warning: "Some systems need attention",
  error: "Some systems are down",
};
/** The page of a part, if it has one. */
const PAGES: Readonly<Record<string, { href: string; label: string }>> = {
  workers: { href: "/app/nodes", label: "Nodes" },
  operations: { href: "/app/activity", label: "Activity" },
  schedules: { href: "/admin/django_q/schedule/", label: "Pause or resume schedules" },
};

export function HealthPage(): ReactNode {
  const health = useHealth();
  return (
    <div className="system">
      <PageHead title="System health" note={health.data === undefined ? undefined : OVERALL_TEXTS[health.data.state]} />
      {health.isPending && <Loading subject="system health" />}
      <Problem error={health.error} onRetry={() => void health.refetch()} />
      {health.data !== undefined && <HealthParts health={health.data} />}
    </div>
  );
}

function useHealth() {
  const queries = useQueryClient();
  const beats = useLive((state) => state.beats);
  const notices = useLive((state) => state.notices);
  // A read that takes longer than a beat goes on: else none would end during an outage.
  const refresh = () => void queries.invalidateQueries({ queryKey: KEY }, { cancelRefetch: false });
  useChange(beats, refresh);
  useChange(notices, refresh);
  return useQuery({
    queryKey: KEY,
    queryFn: ({ signal }) => call(client.GET("/api/system/health", { signal })),
    placeholderData: keepPreviousData,
  });
}

function HealthParts({ health }: { health: Health }): ReactNode {
  return (
    <>
      <section>
        <h2>Parts</h2>
        <ul className="system-lines" aria-label="Parts">
          {health.parts.map((part) => (
            <PartLine key={part.id} part={part} />
          ))}
        </ul>
      </section>
      <section>
        <h2>Schedules</h2>
        <ul className="system-lines" aria-label="Schedules">
          {health.schedules.map((schedule) => (
            <ScheduleLine key={schedule.id} schedule={schedule} />
          ))}
        </ul>
      </section>
      <section>
        <h2>Server processes</h2>
        <ul className="system-lines" aria-label="Server processes">
          {health.processes.map((process) => (
            <li key={`${process.kind} ${process.name}`}>
              <h3>{process.name}</h3>
              <span>{process.kind}</span>
              <p>
                {process.version === "" ? "version unknown" : `version ${process.version}`} · started <Ago at={process.started_at} /> · last seen <Ago at={process.seen_at} />
              </p>
            </li>
          ))}
        </ul>
      </section>
    </>
  );
}

function ScheduleLine({ schedule }: { schedule: Health["schedules"][number] }): ReactNode {
  return (
    <li>
      <h3>{schedule.name}</h3>
      {schedule.paused ? <Pill tone="warn" word="paused" /> : schedule.last_ok === false ? <Pill tone="bad" word="failed" /> : <Pill tone="good" word="on" />}
      <p>
        Last run <Ago at={schedule.last_run} />
        {!schedule.paused && (
          <>
            {" "}
            · next <Ago at={schedule.next_run} now="due" />
          </>
        )}
      </p>
      <a href={`/admin/django_q/schedule/${String(schedule.id)}/change/`}>
        Edit<span className="visually-hidden"> {schedule.name}</span>
      </a>
    </li>
  );
}

function PartLine({ part }: { part: Part }): ReactNode {
  const { tone, word } = STATE_WORDS[part.state];
  const page = PAGES[part.id];
  return (
    <li>
      <h3>{part.name}</h3>
      <Pill tone={tone} word={word} />
      <div>
        <p>
          {part.text}
          {part.since !== null && (
            <span className="muted">
              {" "}
              · since <Ago at={part.since} />
            </span>
          )}
        </p>
        {part.hint !== "" && <p className="muted">{part.hint}</p>}
      </div>
      {page !== undefined && (page.href.startsWith("/app/") ? <Link to={page.href}>{page.label}</Link> : <a href={page.href}>{page.label}</a>)}
    </li>
  );
}

function Pill({ tone, word }: { tone: string; word: string }): ReactNode {
  return <span className={`pill ${tone}`}>{word}</span>;
}
