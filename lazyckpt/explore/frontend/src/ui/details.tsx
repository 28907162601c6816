// A section that opens and closes; the link says whether it is open.

import type { ComponentChildren } from "preact";
import { useParam } from "../context";

interface Props {
  /** Identifies the section on its page, in links. */
  id: string;
  summary: ComponentChildren;
  /** Whether it is open at first. */
  open?: boolean;
  class?: string;
  children: ComponentChildren;
}

export function Details({ id, summary, open = false, class: name, children }: Props) {
  const [shown, show] = useParam(`more.${id}`, open ? "yes" : "no");
  return (
    <details
      class={name}
      open={shown === "yes"}
      onToggle={(event) => {
        const now = event.currentTarget.open ? "yes" : "no";
        if (now !== shown) show(now);
      }}
    >
      <summary>{summary}</summary>
      {children}
    </details>
  );
}
