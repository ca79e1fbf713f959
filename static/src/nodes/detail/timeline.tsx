// The timeline of the node: actor, reason and states of each event. Newest first; older ones on demand.
import { useState, type ReactNode } from "react";
import { Button } from "../../ui/button";
import { Empty } from "../../ui/empty";
import { Problem } from "../../ui/problem";
import { Select, type Option } from "../../ui/select";
import { StatusPill } from "../../ui/status";
import { Ago } from "../../ui/time";
import { useTimeline, type EventKind, type NodeEvent } from "./data";
import { actorWords, changes, KINDS } from "./events";
import { Fetched, Panel } from "./panel";

export function TimelinePanel({ id }: { id: string }): ReactNode {
  const [kind, setKind] = useState<EventKind | "">("");
  const { newest, older } = useTimeline(id, kind);
  return (
    <Panel title="Timeline" aside={<Select label="Event type" labelled="hidden" value={kind} options={OPTIONS} onChange={(next) => setKind(next as EventKind | "")} />}>
      <Fetched query={newest} subject="the timeline">
        {({ events, next }) => (
          <>
            <Events events={events} kind={kind} onAll={() => setKind("")} />
            <Problem error={older.error} onRetry={() => next !== undefined && older.mutate(next)} />
            {next !== undefined && (
              <div>
                <Button busy={older.isPending} onClick={() => older.mutate(next)}>
                  Older
                </Button>
              </div>
            )}
          </>
        )}
      </Fetched>
    </Panel>
  );
}

const OPTIONS: readonly Option[] = [["", "All types"], ...Object.entries(KINDS)];

function Events({ events, kind, onAll }: { events: readonly NodeEvent[]; kind: EventKind | ""; onAll: () => void }): ReactNode {
  if (events.length > 0) {
    return (
      <ol className="nd-events">
        {events.map((event) => (
          <Row key={event.id} event={event} />
        ))}
      </ol>
    );
  }
  if (kind === "") return <Empty title="No events in the retention period" />;
  return (
    <Empty title={`No “${KINDS[kind]}” events`}>
      <Button small onClick={onAll}>
        Show all types
      </Button>
    </Empty>
  );
}

function Row({ event }: { event: NodeEvent }): ReactNode {
  const moved = event.status_before !== event.status_after && event.status_after !== "";
  const details = changes(event);
  return (
    <li>
      <div className="row wrap">
        <strong>{KINDS[event.kind]}</strong>
        {moved && (
          <span className="row">
            {event.status_before !== "" && <StatusPill status={event.status_before} />}
            <span aria-hidden="true">→</span>
            <span className="visually-hidden">to</span>
            <StatusPill status={event.status_after} />
          </span>
        )}
        {event.count > 1 && (
          <span className="tag">
            {event.count} times, most recently <Ago at={event.last_at} />
          </span>
        )}
        <span className="muted nd-when">
          <Ago at={event.at} />
        </span>
      </div>
      <div className="nd-why">
        {event.actor !== "" && (
          <>
            by <bdi>{actorWords(event)}</bdi>
          </>
        )}
        {event.cause !== "" && (
          <>
            {event.actor !== "" && ": "}
            <bdi>{event.cause}</bdi>
          </>
        )}
      </div>
      {details.length > 0 && (
        <ul className="nd-changes">
          {details.map((line) => (
            <li key={line}>
              <bdi>{line}</bdi>
            </li>
          ))}
        </ul>
      )}
    </li>
  );
}
