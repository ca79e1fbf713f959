// A month of days of which one is chosen: arrow keys, Home, End, PageUp and PageDown move, Enter chooses.
import type { ReactNode } from "react";
import { DayPicker } from "react-day-picker";
import { Icon } from "./icons";
import "./calendar.css";

/** The number stands alone in the name of a day, as it does on it. */
const NAMES = new Intl.DateTimeFormat("en-GB", { weekday: "long", day: "numeric", month: "long", year: "numeric" });

export interface CalendarProps {
  /** The chosen day. */
  day: Date | undefined;
  onChoose: (day: Date) => void;
}

export function Calendar({ day, onChoose }: CalendarProps): ReactNode {
  return (
    <DayPicker
      mode="single"
      required
      autoFocus
      navLayout="around"
      weekStartsOn={1}
      selected={day}
      defaultMonth={day ?? new Date()}
      onSelect={onChoose}
      labels={{ labelDayButton: (date, { today, selected }) => `${NAMES.format(date)}${today ? ", today" : ""}${selected ? ", selected" : ""}` }}
      components={{ Chevron: ({ orientation }) => <Icon name={orientation === "left" ? "left" : "right"} /> }}
    />
  );
}
