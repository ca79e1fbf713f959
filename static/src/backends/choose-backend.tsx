// Choosing a backend of the catalogue by typing; a name that no gallery knows can be asked for all the same, because
// workers may have galleries of their own.
import { Command } from "cmdk";
import { useState, type ReactNode } from "react";
import { Button } from "../ui/button";
import { Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import type { Address } from "./address";
import { AddressForm } from "./address-form";
import { search, summary, useCatalogue } from "./catalogue";

const SHOWN = 60;

interface ChooseProps {
  onChoose: (name: string) => void;
  onAddress: (address: Address) => void;
}

export function ChooseBackend({ onChoose, onAddress }: ChooseProps): ReactNode {
  const [from, setFrom] = useState(false);
  return (
    <div className="stack">
      <div className="row wrap" role="group" aria-label="Source">
        <Button small className="chip" aria-pressed={!from} onClick={() => setFrom(false)}>
          By name
        </Button>
        <Button small className="chip" aria-pressed={from} onClick={() => setFrom(true)}>
          By address
        </Button>
      </div>
      {from ? <AddressForm onChoose={onAddress} /> : <ByName onChoose={onChoose} />}
    </div>
  );
}

function ByName({ onChoose }: Pick<ChooseProps, "onChoose">): ReactNode {
  const catalogue = useCatalogue();
  const [term, setTerm] = useState("");
  const entries = catalogue.data?.backends ?? [];
  // Builds for one kind of hardware show as soon as somebody types: then they are looked for.
  const matches = search(entries, { term, builds: term !== "", development: term !== "" }).slice(0, SHOWN);
  const typed = term.trim();
  const named = matches.some((entry) => entry.name.toLowerCase() === typed.toLowerCase());
  return (
    <div className="stack">
      {catalogue.isPending && <Loading subject="the catalogue" />}
      <Problem error={catalogue.error} onRetry={() => void catalogue.refetch()} />
      <Command label="Backends" shouldFilter={false} className="choose-backend">
        <Command.Input className="input" value={term} onValueChange={setTerm} placeholder="Backend name" autoFocus />
        <Command.List label="Backends in the catalogue">
          {matches.map((entry) => (
            <Command.Item key={entry.id} value={entry.id} onSelect={() => onChoose(entry.name)}>
              <strong className="name">{entry.name}</strong>
              <span className="name muted grow">{summary(entry.description)}</span>
              {entry.isAlias && <span className="tag">build</span>}
            </Command.Item>
          ))}
          {typed !== "" && !named && (
            <Command.Item value={` ${typed}`} onSelect={() => onChoose(typed)}>
              Use <strong className="name">{typed}</strong>
              <span className="muted">not listed in any configured gallery</span>
            </Command.Item>
          )}
        </Command.List>
      </Command>
    </div>
  );
}
