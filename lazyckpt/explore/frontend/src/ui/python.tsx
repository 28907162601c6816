// A button that copies a text, and the Python line that gives what is on screen.

import { useState } from "preact/hooks";
import { copyText } from "./save";
import { UNSAFE } from "./text";
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

/** The Python call that gives what is on screen. */
export function Python({ code }: { code: string }) {
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

/** A text as a Python literal of one line. */
export function pyText(text: string): string {
  return JSON.stringify(text).replace(UNSAFE, (c) => {
    const point = c.codePointAt(0)!;
    return point > 0xffff ? `\\U${point.toString(16).padStart(8, "0")}` : `\\u${point.toString(16).padStart(4, "0")}`;
  });
}
