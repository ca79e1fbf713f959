// What narrows the list: counts by state that are switches, a box for words, and facets with counts.
import { Popover } from "radix-ui";
import { useRef, useState, type ReactNode } from "react";
import { StatusPill } from "../../ui/status";
import { Button } from "../../ui/button";
import { useShortcut } from "../../ui/shortcuts";
import { STATES, toggled, type Counts, type Facet, type Filter, type SetFilter } from "./filter";
import { EXAMPLE } from "./query";

interface FiltersProps {
  filter: Filter;
  counts: Counts;
  onFilter: SetFilter;
}

const TITLES: Readonly<Record<Exclude<Facet, "state">, string>> = { type: "Type", vendor: "GPU", label: "Label" };

export function Filters({ filter, counts, onFilter }: FiltersProps): ReactNode {
  return (
    <div className="filters" role="search" aria-label="Nodes">
      <Box filter={filter} onFilter={onFilter} />
      <div className="row wrap" role="group" aria-label="State">
        {STATES.map((state) => (
          <StateSwitch key={state} state={state} filter={filter} counts={counts} onFilter={onFilter} />
        ))}
      </div>
      <div className="row wrap">
        {(["type", "vendor", "label"] as const).map((facet) => (
          <FacetList key={facet} facet={facet} filter={filter} counts={counts} onFilter={onFilter} />
        ))}
      </div>
    </div>
  );
}

function Box({ filter, onFilter }: Pick<FiltersProps, "filter" | "onFilter">): ReactNode {
  const box = useRef<HTMLInputElement>(null);
  useShortcut("f", () => box.current?.focus(), "Filter the nodes");
  return (
    <input
      ref={box}
      type="search"
      className="input filter-box"
      aria-label="Filter nodes"
      placeholder="Filter: words, status:offline, zone=west"
      title={`Words match name, address, labels and models. You can also use: ${EXAMPLE}`}
      value={filter.q}
      spellCheck={false}
      autoComplete="off"
      onChange={(event) => {
        const q = event.target.value;
        onFilter((before) => ({ ...before, q }));
      }}
    />
  );
}

function StateSwitch({ state, filter, counts, onFilter }: FiltersProps & { state: string }): ReactNode {
  const chosen = filter.chosen.state.includes(state);
  const number = counts.state.get(state) ?? 0;
  return (
    <button
      type="button"
      className="state-switch"
      aria-pressed={chosen}
      data-empty={number === 0 || undefined}
      onClick={() => onFilter((before) => toggled(before, "state", state))}
    >
      <StatusPill status={state} />
      <b>{number}</b>
    </button>
  );
}

const LISTED = 60;
const SEARCHED_FROM = 9;

function FacetList({ facet, filter, counts, onFilter }: FiltersProps & { facet: Exclude<Facet, "state"> }): ReactNode {
  const chosen = filter.chosen[facet];
  const title = TITLES[facet];
  const said = chosen.length === 0 ? "" : chosen.length === 1 ? `: ${chosen[0] ?? ""}` : `: ${chosen.length}`;
  return (
    <Popover.Root>
      <Popover.Trigger asChild>
        <Button small className={`facet ${chosen.length > 0 ? "on" : ""}`}>
          <span className="name">
            {title}
            <bdi>{said}</bdi>
          </span>
          <span aria-hidden="true">▾</span>
        </Button>
      </Popover.Trigger>
      <Popover.Portal>
        <Popover.Content className="menu facet-values" align="start" sideOffset={4} collisionPadding={8} aria-label={title}>
          <FacetValues
            counts={counts[facet]}
            chosen={chosen}
            onToggle={(value) => onFilter((before) => toggled(before, facet, value))}
          />
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}

/** The values with their counts: what is chosen stays, even where nothing has it any more. */
function valuesOf(counts: ReadonlyMap<string, number>, chosen: readonly string[]): [string, number][] {
  const all = new Map([...chosen.map((value) => [value, 0] as const), ...counts]);
  return [...all].sort(([left], [right]) => left.localeCompare(right));
}

interface FacetValuesProps {
  counts: ReadonlyMap<string, number>;
  chosen: readonly string[];
  onToggle: (value: string) => void;
}

function FacetValues({ counts, chosen, onToggle }: FacetValuesProps): ReactNode {
  const [text, setText] = useState("");
  const values = valuesOf(counts, chosen);
  const found = values.filter(([value]) => value.toLowerCase().includes(text.toLowerCase()));
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
        {found.slice(0, LISTED).map(([value, number]) => (
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
      {found.length > LISTED && <p className="muted">and {found.length - LISTED} more; type to search</p>}
      {found.length === 0 && <p className="muted">none</p>}
    </div>
  );
}
