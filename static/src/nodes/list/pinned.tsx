// Pending decisions: one line above the list with their number, and all of them on demand, so that the list
// itself begins on the first screen. An address that ends in its id (`#conflicts`) opens it.
import { useState, type ReactNode } from "react";
import { useLocation } from "react-router";
import { Button } from "../../ui/button";

interface PinnedProps {
  id: string;
  title: string;
  /** The risk of a wrong decision. */
  risk: string;
  /** List items. */
  cards: readonly ReactNode[];
  /** The number that is open at first. */
  first: number;
  actions?: ReactNode;
  children?: ReactNode;
}

export function Pinned({ id, title, risk, cards, first, actions, children }: PinnedProps): ReactNode {
  const { hash } = useLocation();
  const [isExpanded, setIsExpanded] = useState(false);
  const [open, setOpen] = useState(hash === `#${id}`);
  const shown = isExpanded ? cards : cards.slice(0, first);
  return (
    <section className={`pinned stack ${open ? "open" : ""}`} aria-labelledby={`${id}-title`}>
      <div className="row wrap spread">
        <h2 id={`${id}-title`}>{title}</h2>
        <div className="row wrap">
          {open && cards.length > first && (
            <Button small aria-expanded={isExpanded} aria-controls={`${id}-cards`} onClick={() => setIsExpanded(!isExpanded)}>
              {isExpanded ? "Show fewer" : `Show all ${cards.length}`}
            </Button>
          )}
          {actions}
          <Button small aria-expanded={open} aria-label={`${open ? "Hide" : "Review"} ${title}`} onClick={() => setOpen(!open)}>
            {open ? "Hide" : "Review"}
          </Button>
        </div>
      </div>
      {open && (
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
