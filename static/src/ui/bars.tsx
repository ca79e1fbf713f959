// Bars: progress of work, and use of a resource with what is reserved of it.
import type { ReactNode } from "react";
import { bytes, pair } from "../lib/format";

/** Progress with a name; assistive tech does not announce every tick. */
export function ProgressBar({ value, name, tone = "" }: { value: number; name: string; tone?: "" | "good" | "bad" }): ReactNode {
  const percent = Math.floor(Math.min(Math.max(value, 0), 100));
  return (
    <div className={`bar ${tone}`} role="progressbar" aria-label={name} aria-valuenow={percent} aria-valuemin={0} aria-valuemax={100}>
      <span style={{ width: `${percent}%` }} />
    </div>
  );
}

/** From which share of the whole a figure is tight, and from which it is as good as full. */
const TIGHT = 0.85;
const FULL = 0.95;

/** How full a resource is; reserved counts as used. */
export function fillOf(used: number, total: number): "" | "tight" | "full" {
  if (total <= 0) return "";
  return used >= FULL * total ? "full" : used >= TIGHT * total ? "tight" : "";
}

/** The legend of the meters' colours; the text beside a meter has the same figures. */
export function MeterLegend(): ReactNode {
  return (
    <ul className="meter-legend" aria-label="Colours of the bars">
      <li data-of="used">used</li>
      <li data-of="tight">from 85%</li>
      <li data-of="full">from 95%</li>
      <li data-of="reserved">reserved</li>
      <li data-of="free">free</li>
    </ul>
  );
}

/** Used, reserved and total bytes as one bar with its figures; nothing if the total is not known. */
export function Meter({ name, used, reserved = 0, total }: { name: string; used: number; reserved?: number; total: number }): ReactNode {
  if (total <= 0) return <span className="muted">unknown</span>;
  const share = (part: number) => `${Math.min(100, (100 * Math.max(part, 0)) / total)}%`;
  const fill = fillOf(used + reserved, total);
  const full = fill === "" ? "" : `, ${Math.floor((100 * (used + reserved)) / total)}%`;
  const words = `${bytes(used)} of ${bytes(total)}${reserved > 0 ? `, ${bytes(reserved)} reserved` : ""}${full}`;
  return (
    <div className="meter" title={`${name}: ${words}`}>
      <div className={`bar ${fill}`} role="img" aria-label={`${name}: ${words}`}>
        <span style={{ width: share(used) }} />
        <span className="reserved" style={{ width: share(Math.min(reserved, total - used)) }} />
      </div>
      <span aria-hidden="true" className={`fill ${fill}`}>
        {pair(used, total)}
      </span>
    </div>
  );
}
