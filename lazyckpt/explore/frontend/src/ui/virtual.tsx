// A list of rows of one height, of which only those in view are drawn.

import type { ComponentChildren, CSSProperties, HTMLAttributes } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import "./virtual.css";

const BEYOND = 8; // rows drawn above and below those in view
const PRINTED = 1000; // rows that a print has

interface Props extends Omit<HTMLAttributes<HTMLDivElement>, "label"> {
  count: number;
  /** Height of a row, in pixels. */
  rowHeight: number;
  /** Draws a row; it puts `style` on its element and gives it a key. */
  row(index: number, style: CSSProperties): ComponentChildren;
  /** A row that is scrolled into view when it changes. */
  active?: number;
  /** What stands above the rows and scrolls with them to the side only. */
  head?: ComponentChildren;
}

export function VirtualList({ count, rowHeight, row, active, head, class: extra, ...rest }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const printing = usePrinting();
  useLayoutEffect(() => {
    const element = box.current!;
    const measure = () => setView({ top: element.scrollTop, height: element.clientHeight || 600 });
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    const element = box.current!;
    if (active === undefined || active < 0) return;
    const above = head ? rowHeight : 0;
    const top = active * rowHeight;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + rowHeight + above > element.scrollTop + element.clientHeight) {
      element.scrollTop = top + rowHeight + above - element.clientHeight;
    }
  }, [active, rowHeight]);
  const first = printing ? 0 : Math.max(0, Math.floor(view.top / rowHeight) - BEYOND);
  const last = printing ? Math.min(count, PRINTED) : Math.min(count, Math.ceil((view.top + view.height) / rowHeight) + BEYOND);
  const rows = [];
  for (let n = first; n < last; n += 1) rows.push(row(n, { top: `${n * rowHeight}px`, height: `${rowHeight}px` }));
  return (
    <div
      ref={box}
      class={`virtual${extra ? ` ${extra as string}` : ""}`}
      onScroll={(event) => setView({ top: event.currentTarget.scrollTop, height: event.currentTarget.clientHeight })}
      {...rest}
    >
      {head}
      <div class="virtual-rows" role="presentation" style={{ height: `${(printing ? last : count) * rowHeight}px` }}>
        {rows}
      </div>
    </div>
  );
}

/** Whether the page is being printed. */
function usePrinting(): boolean {
  const [printing, setPrinting] = useState(false);
  useEffect(() => {
    const before = () => setPrinting(true);
    const after = () => setPrinting(false);
    addEventListener("beforeprint", before);
    addEventListener("afterprint", after);
    return () => {
      removeEventListener("beforeprint", before);
      removeEventListener("afterprint", after);
    };
  }, []);
  return printing;
}
