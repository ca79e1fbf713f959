// Light or dark: the system's, unless a person has chosen; the choice stays in this browser.
const KEY = "theme";

export type Theme = "light" | "dark" | "system";

export function chosen(): Theme {
  const kept = localStorage.getItem(KEY);
  return kept === "light" || kept === "dark" ? kept : "system";
}

export function choose(theme: Theme): void {
  if (theme === "system") localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, theme);
  show();
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function show(): void {
  const theme = chosen();
  const isDark = theme === "dark" || (theme === "system" && dark.matches);
  document.documentElement.dataset["theme"] = isDark ? "dark" : "light";
}

export function startTheme(): void {
  show();
  dark.addEventListener("change", show);
}
