// Why a model runs where it does, in its panel on demand: what its next request would find, the last decisions, and
// for one of them the best nodes and those that nearly could.
import { useId, useState, type ReactNode } from "react";
import { useLive } from "../live/hooks";
import { Button } from "../ui/button";
import { Loading } from "../ui/empty";
import { Icon } from "../ui/icons";
import { Problem } from "../ui/problem";
import { StatusPill } from "../ui/status";
import { Ago } from "../ui/time";
import { Details } from "./decision";
import { choicesOf, NOW, slotOf, useExplained, versionOf, type Choice, type Decision, type Explained } from "./explanation-query";
import type { ModelRow } from "./rows";

export function Why({ row }: { row: ModelRow }): ReactNode {
  return (
    <Disclosure label="Why here" subject={row.name}>
      {() => <Reasons row={row} />}
    </Disclosure>
  );
}

interface DisclosureProps {
  label: string;
  /** What its content is about, for those who do not see where it stands. */
  subject: string;
  children: () => ReactNode;
}

/** A button that shows its content; the content is made when it is opened. */
export function Disclosure({ label, subject, children }: DisclosureProps): ReactNode {
  const [open, setOpen] = useState(false);
  const id = useId();
  return (
    <div className="why">
      <h3>
        <Button small kind="ghost" aria-expanded={open} aria-controls={id} aria-label={`${label}: ${subject}`} onClick={() => setOpen(!open)}>
          {label} <Caret open={open} />
        </Button>
      </h3>
      <div id={id} hidden={!open}>
        {open && children()}
      </div>
    </div>
  );
}

function Caret({ open }: { open: boolean }): ReactNode {
  return (
    <span className={`strip-caret ${open ? "open" : ""}`}>
      <Icon name="down" />
    </span>
  );
}

function Reasons({ row }: { row: ModelRow }): ReactNode {
  const { data, dataUpdatedAt, error, isFetching, isPending, refetch } = useExplained(row.name, versionOf(row));
  const retry = () => void refetch();
  return (
    <div className="stack">
      {isPending && <Loading subject="reasons" />}
      <Problem error={error} onRetry={retry} />
      {data !== undefined && (
        <>
          <div className="row wrap">
            <p className="anywhere">
              <strong>Next request:</strong>{" "}
              <span role="status">
                <bdi>{data.next.says}</bdi>
              </span>
            </p>
            <AsOf at={dataUpdatedAt} />
            <Button small kind="ghost" aria-label={`Refresh: ${row.name}`} busy={isFetching} onClick={retry}>
              Refresh
            </Button>
          </div>
          <Decisions name={row.name} explained={data} />
        </>
      )}
    </div>
  );
}

/** `at` is this browser's time. */
function AsOf({ at }: { at: number }): ReactNode {
  const skew = useLive((state) => state.skew);
  return (
    <span className="muted">
      as of <Ago at={new Date(at + skew).toISOString()} />
    </span>
  );
}

/** One is open at a time: the latest, until a person chooses. */
function Decisions({ name, explained }: { name: string; explained: Explained }): ReactNode {
  const [chosen, setChosen] = useState<string | null>(null);
  const choices = choicesOf(explained);
  const shown = chosen ?? String(explained.records[0]?.id ?? NOW);
  return (
    <>
      {explained.records.length === 0 && <p className="muted">No placement decisions yet.</p>}
      {choices.length > 0 && (
        <ul className="why-decisions" aria-label={`Decisions for ${name}`}>
          {choices.map((choice) => (
            <Line key={choice.key} choice={choice} name={name} open={choice.key === shown} onToggle={() => setChosen(choice.key === shown ? "" : choice.key)} />
          ))}
        </ul>
      )}
    </>
  );
}

interface LineProps {
  choice: Choice;
  name: string;
  open: boolean;
  onToggle: () => void;
}

function Line({ choice, name, open, onToggle }: LineProps): ReactNode {
  const id = useId();
  const { decision, recorded } = choice;
  return (
    <li>
      <button type="button" className="why-toggle" aria-expanded={open} aria-controls={id} onClick={onToggle}>
        {recorded === null ? (
          <span className="anywhere grow">
            One more replica would now {decision.outcome === "placed" ? "go to " : "wait"}
            {decision.outcome === "placed" && <Slot decision={decision} />}
          </span>
        ) : (
          <>
            <StatusPill status={decision.outcome} />{" "}
            <span className="anywhere grow">{decision.outcome === "placed" && <Slot decision={decision} />}</span>{" "}
            <span className="muted">
              <Ago at={recorded.at} />
            </span>
          </>
        )}
        <Caret open={open} />
      </button>
      <p className="why-sentence anywhere">
        <bdi>{decision.reason}</bdi>
      </p>
      <div id={id} hidden={!open} className="why-details">
        {open && <Details decision={decision} recorded={recorded} name={name} />}
      </div>
    </li>
  );
}

function Slot({ decision }: { decision: Decision }): ReactNode {
  return (
    <strong>
      <bdi>{slotOf(decision)}</bdi>
    </strong>
  );
}
