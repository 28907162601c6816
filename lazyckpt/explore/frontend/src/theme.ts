// The theme: as the system has it, light, or dark; kept in the browser.

export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

const KEY = "lazyckpt-theme";

export function keptTheme(): Theme {
  try {
    const kept = localStorage.getItem(KEY);
    return THEMES.find((theme) => theme === kept) ?? "auto";
  } catch {
    return "auto"; // a browser may refuse storage to this page
  }
}

export function keepTheme(theme: Theme): void {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // a browser may refuse storage to this page: the theme holds until it is closed
  }
}
