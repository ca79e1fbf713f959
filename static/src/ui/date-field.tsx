// A date and a time of this browser's zone: typed, or the day chosen from a calendar that opens beside the field.
import { Popover } from "radix-ui";
import { lazy, Suspense, useId, useState, type ReactNode } from "react";
import { Button } from "./button";
import { Icon } from "./icons";
import { FieldMessage, TextInput } from "./text-field";

const FORMAT = "YYYY-MM-DD HH:MM";
const TYPED = /^(\d{4}-\d{2}-\d{2})(?:[ T](\d{2}:\d{2}))?$/;

/** An ISO time as the field shows it; "" for none. */
export function fieldOf(iso: string): string {
  const at = new Date(iso);
  if (iso === "" || Number.isNaN(at.getTime())) return "";
  const two = (number: number) => String(number).padStart(2, "0");
  return `${String(at.getFullYear()).padStart(4, "0")}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

/** And back; a day alone is its beginning. "" for anything else. */
export function isoOf(text: string): string {
  const [, day = "", time = "00:00"] = TYPED.exec(text.trim()) ?? [];
  const at = new Date(`${day}T${time}`);
  // The 31st of a shorter month would be a day of the next one.
  return !Number.isNaN(at.getTime()) && at.getDate() === Number(day.slice(8)) ? at.toISOString() : "";
}

function NoCalendar(): ReactNode {
  return <p className="muted">The calendar could not be loaded. Type the date into the field.</p>;
}

const Calendar = lazy(() =>
  import("./calendar").then(
    (loaded) => ({ default: loaded.Calendar }),
    () => ({ default: NoCalendar }),
  ),
);

interface DateFieldProps {
  label: string;
  /** An ISO time, or "" for none. */
  value: string;
  /** Called with "" as long as what is typed is no date. */
  onChange: (iso: string) => void;
}

export function DateField({ label, value, onChange }: DateFieldProps): ReactNode {
  const id = useId();
  const [typed, setTyped] = useState({ text: fieldOf(value), iso: value });
  const [left, setLeft] = useState(false);
  const text = typed.iso === value ? typed.text : fieldOf(value);
  const change = (next: string) => {
    setTyped({ text: next, iso: isoOf(next) });
    onChange(isoOf(next));
  };
  const problem = left && text !== "" && isoOf(text) === "" ? `Not a date. Use the format ${FORMAT}.` : "";
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      <span className="row date-field">
        <TextInput
          id={id}
          size={FORMAT.length}
          placeholder={FORMAT}
          value={text}
          onChange={change}
          onFocus={() => setLeft(false)}
          onBlur={() => setLeft(true)}
          aria-invalid={problem !== "" || undefined}
          aria-describedby={`${id}-said`}
        />
        <DayButton label={label} value={value} onChange={change} />
      </span>
      <FieldMessage id={`${id}-said`} problem={problem} description="" />
    </div>
  );
}

/** Opens the calendar; the chosen day keeps the time that the field has. */
function DayButton({ label, value, onChange }: { label: string; value: string; onChange: (text: string) => void }): ReactNode {
  const [open, setOpen] = useState(false);
  const choose = (day: Date) => {
    const time = fieldOf(value).slice(10) || " 00:00";
    onChange(fieldOf(day.toISOString()).slice(0, 10) + time);
    setOpen(false);
  };
  return (
    <Popover.Root open={open} onOpenChange={setOpen}>
      <Popover.Trigger asChild>
        <Button className="icon" aria-label={`${label}: choose a day`}>
          <Icon name="calendar" />
        </Button>
      </Popover.Trigger>
      <Popover.Portal>
        <Popover.Content className="menu" align="end" sideOffset={4} collisionPadding={8} aria-label={`${label}: calendar`}>
          <Suspense fallback={<p className="muted">Loading…</p>}>
            <Calendar day={value === "" ? undefined : new Date(value)} onChoose={choose} />
          </Suspense>
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}
