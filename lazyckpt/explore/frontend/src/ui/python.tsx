// A button that copies a text, and the Python line that gives what is on screen.

import { useState } from "preact/hooks";
import { useExplorer, useLoaded } from "../context";
import type { Params } from "../transport";
import { copyText } from "./save";
import "./python.css";

export function CopyButton({ text, label }: { text: string; label: string }) {
  const [done, setDone] = useState(false);
  return (
    <button
      type="button"
      class="copy"
      title={label}
      aria-label={done ? "copied" : label}
      onClick={(event) => {
        event.stopPropagation();
        void copyText(text).then(() => {
          setDone(true);
          setTimeout(() => setDone(false), 1200);
        });
      }}
    >
      <svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true">
        {done ? (
          <path d="M3 8.5 6.5 12 13 4.5" class="copy-line" />
        ) : (
          <path d="M5.5 5.5h7v8h-7zM3.5 10.5v-8h7" class="copy-line" />
        )}
      </svg>
    </button>
  );
}

/** The lines of Python for a page's pictures and tables, by their names; the server writes them (explore/lines.py). */
export function useLines(params: Params): Record<string, string> {
  const { api, route } = useExplorer();
  const asked = { page: route.page, ...params };
  const found = useLoaded(
    (signal) => (api.holds("python", asked) ? api.json<{ lines: Record<string, string> }>("python", asked, signal) : Promise.resolve({ lines: {} })),
    [JSON.stringify(asked)],
  );
  return found.value?.lines ?? {}; // those before, until the new ones are here: nothing jumps
}

/** The line of Python that gives what is on screen. */
export function Python({ code }: { code: string | undefined }) {
  if (code === undefined) return null;
  return (
    <p class="python">
      <span class="python-lang" aria-hidden="true">
        Python
      </span>
      <code tabIndex={0}>{code}</code>
      <CopyButton text={code} label="copy this line" />
    </p>
  );
}

