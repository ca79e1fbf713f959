// Bars: progress of work, and use of a resource with what is reserved of it.
import type { ReactNode } from "react";
import { bytes } from "../lib/format";

/** Progress with a name; nothing for assistive tech to be told at every tick. */
export function ProgressBar({ value, name, tone = "" }: { value: number; name: string; tone?: "" | "good" | "bad" }): ReactNode {
  const whole = Math.floor(Math.min(Math.max(value, 0), 100));
  return (
    <div className={`bar ${tone}`} role="progressbar" aria-label={name} aria-valuenow={whole} aria-valuemin={0} aria-valuemax={100}>
      <span style={{ width: `${whole}%` }} />
    </div>
  );
}

/** Used, reserved and total bytes as one bar with its figures; nothing if the total is not known. */
export function Meter({ name, used, reserved = 0, total }: { name: string; used: number; reserved?: number; total: number }): ReactNode {
  if (total <= 0) return <span className="muted">unknown</span>;
  const share = (part: number) => `${Math.min(100, (100 * Math.max(part, 0)) / total)}%`;
  const words = `${bytes(used)} of ${bytes(total)}${reserved > 0 ? `, ${bytes(reserved)} reserved` : ""}`;
  return (
    <div className="meter" title={`${name}: ${words}`}>
      <div className="bar" role="img" aria-label={`${name}: ${words}`}>
        <span style={{ width: share(used) }} />
        <span className="reserved" style={{ width: share(Math.min(reserved, total - used)) }} />
      </div>
      <span aria-hidden="true">
        {bytes(used)} / {bytes(total)}
      </span>
    </div>
  );
}
