// Keys that work on every page, and what the help says of them.

export const KEYS: [string, string][] = [
  ["?", "this help"],
  ["/", "search names"],
  ["1 … 9", "go to a page"],
  [", .", "previous and next step of a run"],
  ["t", "theme: as the system, light, dark"],
  ["↑ ↓", "next and previous row; cell of a grid"],
  ["→ ←", "open and close a group of the tree; go to its parent"],
  ["Shift →", "list folded layers one by one"],
  ["Home End", "first and last row"],
  ["a … z", "in the tree: go to the next name that begins so"],
  ["Enter", "choose a row; go on to the tensor's page"],
  ["+ −", "zoom into a tensor, and out"],
  ["Esc", "close a window; empty the search"],
];

/** Whether a key is for a field in which one writes. */
export function isTyping(event: KeyboardEvent): boolean {
  const target = event.composedPath()[0];
  return (
    target instanceof HTMLElement &&
    (target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName))
  );
}
