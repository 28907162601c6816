// How wide an element is, so that pictures are drawn in the pixels of the page and their labels keep their size.

import { useLayoutEffect, useState } from "preact/hooks";

/** What is given to the element as `ref`, and its width in pixels, between 240 and 1,600. */
export function useWidth<T extends HTMLElement>(before = 960): [(element: T | null) => void, number] {
  const [element, setElement] = useState<T | null>(null);
  const [width, setWidth] = useState(before);
  useLayoutEffect(() => {
    if (!element) return;
    const measure = () => setWidth(Math.max(240, Math.min(1600, element.clientWidth || before)));
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, [element]);
  return [setElement, width];
}
