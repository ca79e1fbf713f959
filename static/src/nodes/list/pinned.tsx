// What waits for a decision, on top of the list: the first few open, the others on demand, all of it put away while
// somebody works on the list. What is put away still says how much it is.
import { useState, type ReactNode } from "react";
import { Button } from "../../ui/button";
import { room } from "./room";

interface PinnedProps {
  id: string;
  title: string;
  /** What goes wrong if the decision is wrong. */
  risk: string;
  /** List items. */
  cards: readonly ReactNode[];
  /** How many of them are open at first. */
  first: number;
  actions?: ReactNode;
  children?: ReactNode;
}

export function Pinned({ id, title, risk, cards, first, actions, children }: PinnedProps): ReactNode {
  const [all, setAll] = useState(false);
  const [away, setAway] = useState(false);
  const shown = all ? cards : cards.slice(0, first);
  return (
    <section className="pinned stack" style={away ? undefined : room(Math.max(shown.length, 1))} aria-labelledby={`${id}-title`}>
      <div className="row wrap spread">
        <h2 id={`${id}-title`}>{title}</h2>
        <div className="row wrap">
          {!away && cards.length > first && (
            <Button small aria-expanded={all} aria-controls={`${id}-cards`} onClick={() => setAll(!all)}>
              {all ? "Show fewer" : `Show all ${cards.length}`}
            </Button>
          )}
          {actions}
          <Button small kind="ghost" aria-expanded={!away} aria-label={`${away ? "Show" : "Hide"} ${title}`} onClick={() => setAway(!away)}>
            {away ? "Show" : "Hide"}
          </Button>
        </div>
      </div>
      {!away && (
        <>
          <p className="risk">{risk}</p>
          {children}
          <ul id={`${id}-cards`} className="pinned-cards">
            {shown}
          </ul>
        </>
      )}
    </section>
  );
}
