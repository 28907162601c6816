// A link to a page of the explorer, which also opens in a new tab.

import type { ComponentChildren } from "preact";
import { useExplorer } from "../context";

interface Props {
  page: string;
  /** Parameters that the page is given. */
  params?: Record<string, string>;
  /** Whether it is the page on screen. */
  current?: boolean;
  children: ComponentChildren;
}

export function PageLink({ page, params = {}, current = false, children }: Props) {
  const { address, go } = useExplorer();
  return (
    <a
      href={address(params, page)}
      aria-current={current ? "page" : undefined}
      onClick={(event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        go(params, page);
      }}
    >
      {children}
    </a>
  );
}
