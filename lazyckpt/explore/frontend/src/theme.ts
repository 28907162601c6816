// The theme: as the notebook or the system has it, light, or dark; kept in the browser.

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

// JupyterLab, VS Code, marimo, pages of Sphinx, Colab
const LIGHT = "body[data-jp-theme-light='true'], body.vscode-light, body.light-theme, html[data-theme='light'], html[theme='light']";
const DARK = "body[data-jp-theme-light='false'], body.vscode-dark, body.dark-theme, html[data-theme='dark'], html[theme='dark']";

/** The theme of the notebook around the explorer, which may differ from the system's. */
export function hostTheme(): "light" | "dark" | undefined {
  return document.querySelector(DARK) ? "dark" : document.querySelector(LIGHT) ? "light" : undefined;
}

/** Calls when the theme of the notebook may have changed. */
export function onHostTheme(changed: () => void): () => void {
  const observer = new MutationObserver(changed);
  const watched = { attributes: true, attributeFilter: ["class", "theme", "data-theme", "data-jp-theme-light"] };
  observer.observe(document.documentElement, watched);
  observer.observe(document.body, watched);
  return () => observer.disconnect();
}
