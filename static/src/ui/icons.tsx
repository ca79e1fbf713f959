// The page's own pictures: strokes of the text's colour in a square of 16. They never say anything alone.
import type { ReactNode } from "react";

const PATHS = {
  overview: "M2 13.5V2.5M2 13.5h12M4.5 10.5l3-3.5 2.5 2 3.5-5",
  nodes: "M2.5 2.5h11v4h-11zM2.5 9.5h11v4h-11zM5 4.5h.01M5 11.5h.01M8 4.5h3M8 11.5h3",
  backends: "M8 1.8 13.5 5v6L8 14.2 2.5 11V5zM2.5 5 8 8.2 13.5 5M8 8.2v6",
  activity: "M1.5 8.5h3l2-5.5 3 10 2-4.5h3",
  health: "M8 13.5 2.8 8.3a3.2 3.2 0 0 1 4.5-4.5l.7.7.7-.7a3.2 3.2 0 0 1 4.5 4.5z",
  search: "M7 2.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9zM10.3 10.3l3.7 3.7",
  menu: "M2.5 4h11M2.5 8h11M2.5 12h11",
  close: "M3.5 3.5l9 9M12.5 3.5l-9 9",
  light: "M8 5a3 3 0 1 1 0 6 3 3 0 0 1 0-6zM8 1.3v1.4M8 13.3v1.4M1.3 8h1.4M13.3 8h1.4M3.3 3.3l1 1M11.7 11.7l1 1M12.7 3.3l-1 1M4.3 11.7l-1 1",
  dark: "M13.5 9.6A5.8 5.8 0 0 1 6.4 2.5a5.8 5.8 0 1 0 7.1 7.1z",
  system: "M2 3h12v8H2zM5.5 14h5M8 11v3",
  user: "M8 2.3a2.8 2.8 0 1 1 0 5.6 2.8 2.8 0 0 1 0-5.6zM2.7 14c.5-2.7 2.6-4.2 5.3-4.2s4.8 1.5 5.3 4.2",
  admin: "M8 1.7 13 3.6v3.9c0 3.2-2 5.6-5 6.8-3-1.2-5-3.6-5-6.8V3.6zM5.8 8l1.6 1.6 2.9-3.1",
  docs: "M3 2.5h4.2c.5 0 .8.3.8.8v10.2c0-.5-.3-.8-.8-.8H3zM13 2.5H8.8c-.5 0-.8.3-.8.8v10.2c0-.5.3-.8.8-.8H13z",
  external: "M9.5 2.5h4v4M13.5 2.5 7.5 8.5M11.5 9.5v4h-9v-9h4",
  retry: "M13.3 8A5.3 5.3 0 1 1 11.6 4.1M13.5 1.8v3.4h-3.4",
  warning: "M8 2 14.5 13.5h-13zM8 6.3v3.2M8 11.6h.01",
  error: "M8 1.8a6.2 6.2 0 1 1 0 12.4A6.2 6.2 0 0 1 8 1.8zM8 4.9v3.7M8 11h.01",
  done: "M3 8.5l3.3 3.3L13 4.5",
  key: "M5.2 7.3a2.9 2.9 0 1 1 0 5.8 2.9 2.9 0 0 1 0-5.8zM7.4 8.2 13 2.5M10.4 5.2l2.1 2.1",
  leave: "M6.5 2.5h-4v11h4M10 4.8 13.2 8 10 11.2M13.2 8H6",
  keyboard: "M1.5 4h13v8.5h-13zM4 6.7h.01M6.7 6.7h.01M9.3 6.7h.01M12 6.7h.01M5 10h6",
  scheduling: "M2.5 4h4M9.5 4h4M8 2.5v3M2.5 8h1M6.5 8h7M5 6.5v3M2.5 12h7M12.5 12h1M11 10.5v3",
  chat: "M2.5 3h11v8h-6l-3 2.5V11h-2zM5 6h6M5 8.3h4",
  capacity: "M2.5 2.5h4.5v4.5H2.5zM9 2.5h4.5v4.5H9zM2.5 9h4.5v4.5H2.5zM9 9h4.5v4.5H9z",
  model: "M8 2 10 6l4 2-4 2-2 4-2-4-4-2 4-2z",
  more: "M3.5 8h.01M8 8h.01M12.5 8h.01",
  down: "M4 6.2 8 10.2 12 6.2",
  right: "M6.2 4 10.2 8 6.2 12",
  left: "M9.8 4 5.8 8 9.8 12",
  calendar: "M2.5 3.5h11v10h-11zM2.5 6.5h11M5.3 1.8v3M10.7 1.8v3",
  filter: "M2 3h12L9.5 8.5v4.5L6.5 11.5v-3z",
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 16 }: { name: IconName; size?: number }): ReactNode {
  return (
    <svg
      className="glyph"
      width={size}
      height={size}
      viewBox="0 0 16 16"
      fill="none"
      stroke="currentColor"
      strokeWidth="1.4"
      strokeLinecap="round"
      strokeLinejoin="round"
      aria-hidden="true"
      focusable="false"
    >
      <path d={PATHS[name]} />
    </svg>
  );
}
