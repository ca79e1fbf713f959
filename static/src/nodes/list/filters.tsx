// The filters of the list: counts by state that are switches, a box for words, and facets with counts.
import { Popover } from "radix-ui";
import { useId, useRef, useState, type ReactNode } from "react";
import { StatusPill } from "../../ui/status";
import { Button } from "../../ui/button";
import { useShortcut } from "../../ui/shortcuts";
import { STATES, toggled, type Counts, type Facet, type Filter, type SetFilter } from "./filter";
import { SYNTAX } from "./query";

interface FiltersProps {
  filter: Filter;
  counts: Counts;
  /** The parts of the typed text that are invalid. */
  problems: readonly string[];
  onFilter: SetFilter;
}

type Shared = Omit<FiltersProps, "problems">;

const TITLES: Readonly<Record<Exclude<Facet, "state">, string>> = { type: "Type", gpu: "GPU", label: "Label" };

export function Filters({ filter, counts, problems, onFilter }: FiltersProps): ReactNode {
  return (
    <div className="filters" role="search" aria-label="Nodes">
      <Box filter={filter} problems={problems} onFilter={onFilter} />
      <div className="row filter-switches" role="group" aria-label="State">
        {STATES.filter((state) => state !== "rejected" || (counts.state.get(state) ?? 0) > 0 || filter.chosen.state.includes(state)).map((state) => (
          <StateSwitch key={state} state={state} filter={filter} counts={counts} onFilter={onFilter} />
        ))}
      </div>
      <div className="row filter-switches">
        {(["type", "gpu", "label"] as const).map((facet) => (
          <FacetList key={facet} facet={facet} filter={filter} counts={counts} onFilter={onFilter} />
        ))}
      </div>
    </div>
  );
}

function Box({ filter, problems, onFilter }: Omit<FiltersProps, "counts">): ReactNode {
  const box = useRef<HTMLInputElement>(null);
  const messageId = useId();
  useShortcut("f", () => box.current?.focus(), "Filter the nodes");
  return (
    <div className="filter-box">
      <div className="row">
        <input
          ref={box}
          type="search"
          className="input grow"
          aria-label="Filter nodes"
          aria-describedby={messageId}
          aria-invalid={problems.length > 0 || undefined}
          placeholder="Filter: words, status:offline, zone=west"
          value={filter.q}
          spellCheck={false}
          autoComplete="off"
          onChange={(event) => {
            const q = event.target.value;
            onFilter((previous) => ({ ...previous, q }));
          }}
        />
        <Help />
      </div>
      <p id={messageId} className="filter-problem" role="status">
        {problems.join(" ")}
      </p>
    </div>
  );
}

/** The syntax of the filter. */
function Help(): ReactNode {
  return (
    <Popover.Root>
      <Popover.Trigger asChild>
        <Button kind="ghost" className="icon" aria-label="How to filter">
          <span aria-hidden="true">?</span>
        </Button>
      </Popover.Trigger>
      <Popover.Portal>
        <Popover.Content className="menu filter-help" align="end" sideOffset={4} collisionPadding={8} aria-label="How to filter">
          <p>All terms must match.</p>
          <dl>
            {SYNTAX.map(([typed, meaning]) => (
              <div key={typed}>
                <dt>
                  <code>{typed}</code>
                </dt>
                <dd>{meaning}</dd>
              </div>
            ))}
          </dl>
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}

function StateSwitch({ state, filter, counts, onFilter }: Shared & { state: string }): ReactNode {
  const chosen = filter.chosen.state.includes(state);
  const number = counts.state.get(state) ?? 0;
  return (
    <button
      type="button"
      className="state-switch"
      aria-pressed={chosen}
      data-empty={number === 0 || undefined}
      onClick={() => onFilter((previous) => toggled(previous, "state", state))}
    >
      <StatusPill status={state} />
      <b>{number}</b>
    </button>
  );
}

const LISTED = 60;
const SEARCHED_FROM = 9;

function FacetList({ facet, filter, counts, onFilter }: Shared & { facet: Exclude<Facet, "state"> }): ReactNode {
  const chosen = filter.chosen[facet];
  const title = TITLES[facet];
  const selectionText = chosen.length === 0 ? "" : chosen.length === 1 ? `: ${chosen[0] ?? ""}` : `: ${chosen.length}`;
  return (
    <Popover.Root>
      <Popover.Trigger asChild>
        <Button small className={`facet ${chosen.length > 0 ? "on" : ""}`}>
          <span className="name">
            {title}
            <bdi>{selectionText}</bdi>
          </span>
          <span aria-hidden="true">▾</span>
        </Button>
      </Popover.Trigger>
      <Popover.Portal>
        <Popover.Content className="menu facet-values" align="start" sideOffset={4} collisionPadding={8} aria-label={title}>
          <FacetValues
            counts={counts[facet]}
            chosen={chosen}
            onToggle={(value) => onFilter((previous) => toggled(previous, facet, value))}
          />
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}

/** The values with their counts: what is chosen stays, even where nothing has it any more. */
function valuesOf(counts: ReadonlyMap<string, number>, chosen: readonly string[]): [string, number][] {
  const countsByValue = new Map([...chosen.map((value) => [value, 0] as const), ...counts]);
  return [...countsByValue].sort(([left], [right]) => left.localeCompare(right));
}

interface FacetValuesProps {
  counts: ReadonlyMap<string, number>;
  chosen: readonly string[];
  onToggle: (value: string) => void;
}

function FacetValues({ counts, chosen, onToggle }: FacetValuesProps): ReactNode {
  const [text, setText] = useState("");
  const values = valuesOf(counts, chosen);
  const matches = values.filter(([value]) => value.toLowerCase().includes(text.toLowerCase()));
  return (
    <div className="stack">
      {values.length >= SEARCHED_FROM && (
        <input
          type="search"
          className="input"
          aria-label="Find a value"
          placeholder="Find a value"
          value={text}
          onChange={(event) => setText(event.target.value)}
        />
      )}
      <ul>
        {matches.slice(0, LISTED).map(([value, number]) => (
          <li key={value}>
            <label className="facet-value">
              <input type="checkbox" checked={chosen.includes(value)} onChange={() => onToggle(value)} />
              <bdi className="name grow" title={value}>
                {value}
              </bdi>
              <span className="muted">{number}</span>
            </label>
          </li>
        ))}
      </ul>
      {matches.length > LISTED && <p className="muted">and {matches.length - LISTED} more; type to search</p>}
      {matches.length === 0 && <p className="muted">none</p>}
    </div>
  );
}
